"""Whether local files have changed where their fingerprint does not look.

A fingerprint samples 64 KB each of a file's begin, middle and end, since it is computed at every
start and a corpus can hold terabytes. An edit elsewhere that keeps the size is seen by this.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from sparsellm.data.shards import Shard

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
    urls = [part for shard in shards for part in shard.members or (shard.url,)]
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
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"contents {digest.hexdigest()}"
