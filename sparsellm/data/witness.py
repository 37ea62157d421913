"""Whether local files have changed, or differ between nodes, where their fingerprint does not look.

A fingerprint samples 64 KB each of a file's beginning, middle and end, since it is computed at
every start and a corpus can hold terabytes. A witness also notices an edit elsewhere that keeps the
size.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from sparsellm.data.shards import Shard, content_identity

# Read in a second or two from a local disk, once a start.
WHOLE_BYTES = 2 * 2**30
_CHUNK_BYTES = 2**22


def witness(shards: tuple[Shard, ...]) -> str | None:
    """A hash of all contents, or beyond `WHOLE_BYTES` of names, sizes and modification times.

    None if a shard holds tokens, which are compared with the text that they were made of, or is
    at an address, where the server's answer, which is in the fingerprint, covers the whole file.

    Raises:
        FileNotFoundError: a shard is missing.
    """
    urls = _files(shards)
    if any("://" in url for url in urls) or any(shard.format == "tokens" for shard in shards):
        return None
    paths = [Path(url) for url in urls]
    stats = [path.stat() for path in paths]
    digest = xxhash.xxh3_128()
    if sum(stat.st_size for stat in stats) > WHOLE_BYTES:
        for path, stat in zip(paths, stats, strict=True):
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return f"times {digest.hexdigest()}"
    for path, stat in zip(paths, stats, strict=True):
        digest.update(f"{path.name} {stat.st_size}\n".encode())
        _add_content(digest, path)
    return f"contents {digest.hexdigest()}"


def seen_here(shards: Iterable[Shard]) -> tuple[dict[str, str], dict[str, str]]:
    """What this process sees of each local file, for a comparison with other nodes.

    Returns:
        Two descriptions by path. The first must be equal on all nodes: size and a hash of each file
        (of samples, if all files have more than `WHOLE_BYTES`), or why it cannot be read. The
        second is its modification time, if only samples were hashed.
    """
    shards = list(shards)
    files = dict.fromkeys(Path(url) for url in _files(shards) if "://" not in url)
    # The index of a shard of tokens decides what is read, too.
    files |= dict.fromkeys(Path(s.url).with_suffix(".idx") for s in shards if s.format == "tokens")
    whole = sum(path.stat().st_size for path in files if path.is_file()) <= WHOLE_BYTES
    contents, times = {}, {}
    for path in files:
        try:
            stat = path.stat()
            digest = xxhash.xxh3_64(b"" if whole else content_identity(str(path)).encode())
            if whole:
                _add_content(digest, path)
            contents[str(path)] = f"{stat.st_size:,} bytes ({digest.hexdigest()[:8]})"
            times[str(path)] = str(stat.st_mtime_ns)
        except OSError as error:
            contents[str(path)] = str(error.strerror)
    return contents, {} if whole else times


def _files(shards: Iterable[Shard]) -> list[str]:
    return [part for shard in shards for part in shard.members or (shard.url,)]


def _add_content(digest: xxhash.xxh3_64 | xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
