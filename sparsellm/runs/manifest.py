"""What a checkpoint consists of: each file with its size and hashes, and where it comes from.

``manifest.json`` is the last file that is written into a checkpoint. A hash is XXH3 (128 bits) of
each `CHUNK_BYTES` of a file, so that several threads can verify one large file. The manifest
carries a hash of itself.
"""

import fnmatch
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from pydantic import NonNegativeInt, PositiveInt

from sparsellm.paths import usable_cores
from sparsellm.recipe.strict import StrictModel, damaged, read_json, validate
from sparsellm.runs.files import fsync

MANIFEST_FILE = "manifest.json"
REMEDY = "use an older checkpoint, or move this one elsewhere"
CHUNK_BYTES = 64 * 2**20
_READ_BYTES = 4 * 2**20  # stays in a core's cache between reading and hashing
_MAX_THREADS = 16
_LONGEST = 1000  # ids that a manifest keeps


class FileEntry(StrictModel):
    """One file of a checkpoint."""

    size: NonNegativeInt  # bytes
    xxh3_128: list[str]  # of each CHUNK_BYTES, hexadecimal


class Manifest(StrictModel):
    """A checkpoint's files and its place in the history of its run."""

    id: str  # of this checkpoint, random
    ancestors: list[str]  # ids of the checkpoints that it continues, the last one first
    step: NonNegativeInt
    created: str  # UTC, ISO 8601
    world_size: PositiveInt  # ranks that wrote it
    files: dict[str, FileEntry]  # by name

    @property
    def branch(self) -> list[str]:
        """The ids of this checkpoint and of those that it continues, the last one first."""
        return [self.id, *self.ancestors][:_LONGEST]


def write_pieces(path: Path, pieces: Iterable[memoryview]) -> FileEntry:
    """Writes a durable file of these bytes (one-dimensional views), hashing them meanwhile."""
    size, hashes, digest = 0, [], xxhash.xxh3_128()
    with path.open("wb") as file:
        for piece in pieces:
            rest = piece
            while len(rest):
                end = min(_READ_BYTES, CHUNK_BYTES - size % CHUNK_BYTES)
                part, rest = rest[:end], rest[end:]
                digest.update(part)
                file.write(part)
                size += len(part)
                if size % CHUNK_BYTES == 0:
                    hashes.append(digest.hexdigest())
                    digest = xxhash.xxh3_128()
        file.flush()
        os.fsync(file.fileno())
    if size % CHUNK_BYTES or not size:
        hashes.append(digest.hexdigest())
    return FileEntry(size=size, xxh3_128=hashes)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes ``manifest.json``; the folder is then complete."""
    content = manifest.model_dump(mode="json")
    content["xxh3_128"] = _content_hash(content)
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fsync(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    path = folder / MANIFEST_FILE
    content = read_json(path, REMEDY)
    if content.pop("xxh3_128", None) != _content_hash(content):
        raise damaged(path, "its hash differs", REMEDY)
    return validate(Manifest, content, str(path), remedy=REMEDY)


def files_like(folder: Path, pattern: str) -> list[Path]:
    """The files of a checkpoint whose names match, in order; strays beside them do not count.

    Raises:
        FileNotFoundError, ValueError: the manifest is missing or damaged.
    """
    files = read_manifest(folder).files
    return [folder / name for name in sorted(fnmatch.filter(files, pattern))]


def _content_hash(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode("utf-8"))


def verify(folder: Path, names: Iterable[str]) -> None:
    """Compares files of a checkpoint with their hashes, several threads at a time.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file differs from what was written.
    """
    files, jobs = read_manifest(folder).files, []
    for name in names:
        path, entry = folder / name, files[name]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {REMEDY}")
        size = path.stat().st_size
        if size != entry.size:
            raise damaged(path, f"{size:,} bytes for the {entry.size:,} written", REMEDY)
        jobs += [(path, index, digest) for index, digest in enumerate(entry.xxh3_128)]
    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as pool:
        for (path, index, digest), chunk_hash in zip(
            jobs, pool.map(_chunk_hash, jobs), strict=True
        ):
            if chunk_hash != digest:
                first = index * CHUNK_BYTES
                where = f"from byte {first:,} on it is not what was written"
                raise damaged(path, where, REMEDY)


def _chunk_hash(job: tuple[Path, int, str]) -> str:
    path, index, _ = job
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(index * CHUNK_BYTES)
        left = CHUNK_BYTES
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
