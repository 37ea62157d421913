"""Whether local files have changed, or differ between nodes, where their fingerprint does not look.

A fingerprint samples 64 KB each of a file's begin, middle and end, since it is computed at every
start and a corpus can hold terabytes. An edit elsewhere that keeps the size is seen by this.
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
    """Up to `WHOLE_BYTES` the hash of all contents; beyond, of names, sizes and times of change.

    None where there is a shard of tokens, which is checked against what it was made of, or one at
    an address, whose fingerprint is the server's word for all of it.

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
        what must be equal: of up to `WHOLE_BYTES` in all the content of each file, beyond that its
        size and samples, or why it cannot be read; and, beyond `WHOLE_BYTES`, its time of change.
    """
    shards = list(shards)
    files = dict.fromkeys(Path(url) for url in _files(shards) if "://" not in url)
    # Of tokens the index, too, decides what is read.
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
