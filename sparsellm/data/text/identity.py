"""Whether text is the same as before, and the same on all nodes.

A fingerprint samples 64 KB each of a file's beginning, middle and end, since it is computed at
every start and a corpus can hold terabytes. A witness also notices an edit elsewhere that keeps the
size.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from pydantic import BaseModel

from sparsellm.data.text.network import with_retries
from sparsellm.data.text.shards import Shard
from sparsellm.recipe.strict import read_model

TOKENIZE_AGAIN = "run `sparsellm data tokenize` again"
# Read in a second or two from a local disk, once per start.
WHOLE_BYTES = 2 * 2**30
_SAMPLE_BYTES = 65_536
_CHUNK_BYTES = 2**22


def fingerprint(shards: tuple[Shard, ...]) -> str:
    """Changes when a shard is added, removed, renamed or changed.

    Raises:
        FileNotFoundError: a shard is missing.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{identity(shard)}\n".encode())
    return digest.hexdigest()[:16]


def identity(shard: Shard) -> str:
    """A hash that no two shards share, and that changes when a shard or its text field changes.

    It covers the name, the size and 64 KB each of the beginning, middle and end of a local file; an
    address with a commit; or what a server says of another address (etag, checksum, time). Tokens
    have the identity of their text, unless a part of their documents is held out.

    Raises:
        FileNotFoundError: it is missing.
    """
    digest = hashlib.sha256()
    if shard.format == "tokens":
        about = read_about(Path(shard.url))
        if about["content"] != content_identity(shard.url):
            raise ValueError(f"{shard.url} has changed since it was written: {TOKENIZE_AGAIN}")
        if not shard.is_part:
            return str(about["identity"])
        digest.update(str(about["identity"]).encode())  # its ids, not its text, decide the part
    else:
        for part in _files([shard]):
            digest.update(f"{Path(part).name}\n{content_identity(part)}\n".encode())
    if shard.text_field != "text" and shard.format not in ("sources", "tokens"):
        digest.update(f"column {shard.text_field}\n".encode())
    if shard.separator:
        digest.update(f"separator {shard.separator!r}\n".encode())
    if shard.is_part:
        digest.update(f"documents {shard.part}\n".encode())
    if shard.divided:
        digest.update(f"one divided {shard.divided}\n".encode())
    return digest.hexdigest()[:32]


def written_since(shard: Shard, time: float) -> bool:
    """Whether a local file of a shard was written after ``time``, seconds since 1970."""
    paths = (Path(file) for file in _files([shard]) if "://" not in file)
    return any(path.stat().st_mtime > time for path in paths)


def text_bytes(shard: Shard) -> int | None:
    """The size of a shard's text file, also of its tokens; None of several, and of an address.

    Raises:
        FileNotFoundError, ValueError: it is missing, or see `read_about`.
    """
    if shard.format == "tokens":
        size: int | None = read_about(Path(shard.url)).get("text_bytes")
        return size
    return None if "://" in shard.url or not shard.is_file else Path(shard.url).stat().st_size


def read_about(path: Path) -> dict[str, Any]:
    """What the ``.bin`` of a tokenised shard was made of: tokenizer, text, blocks.

    Raises:
        FileNotFoundError, ValueError: the ``.json`` beside it is missing or damaged.
    """
    return read_model(path.with_suffix(".json"), _About, TOKENIZE_AGAIN)


class _About(BaseModel):
    tokenizer: str
    content: str
    identity: str
    text_bytes: int | None = None


def content_identity(url: str) -> str:
    """An identity that changes with the content of a file: local, on the hub, or at an address."""
    if re.search(r"@[0-9a-f]{40}/", url):
        return url
    if "://" in url:
        return with_retries(lambda: _server_says(url), url)
    path = Path(url)
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in sorted({0, size // 2, max(size - _SAMPLE_BYTES, 0)}):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _server_says(url: str) -> str:
    file_system, path = fsspec.core.url_to_fs(url)
    info: dict[str, Any] = file_system.info(path)
    keys = ("size", "etag", "checksum", "sha256", "md5hash", "blob_id", "lastmodified", "mtime")
    properties = {key.lower(): value for key, value in info.items()}
    return " ".join(f"{key}={properties[key]}" for key in keys if key in properties)


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
    files = [(path, path.stat()) for path in map(Path, urls)]
    whole = sum(stat.st_size for _, stat in files) <= WHOLE_BYTES
    digest = xxhash.xxh3_128()
    for path, stat in files:
        time = "" if whole else f" {stat.st_mtime_ns}"
        digest.update(f"{path.name} {stat.st_size}{time}\n".encode())
        if whole:
            _add_content(digest, path)
    return f"{'contents' if whole else 'times'} {digest.hexdigest()}"


def file_identities(shards: Iterable[Shard]) -> tuple[dict[str, str], dict[str, str]]:
    """Identities of the local files that this process sees, to compare with other nodes.

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
