"""The sources of Python's standard library, which every installation has, as shards."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sparsellm.data.shards import Shard

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def stdlib_shards(
    validation_percent: float, num_shards: int
) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Shards of training and held-out files; a file's place follows from its path.

    Raises:
        FileNotFoundError: this Python has no sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in _sources(root) if path.stat().st_size)
    if len(paths) < 4 * num_shards:
        raise FileNotFoundError(
            f"{root} holds only {len(paths)} Python sources: this Python came without its standard "
            "library's text. Use data.corpus=local with files of your own"
        )
    train: list[list[str]] = [[] for _ in range(num_shards)]
    held_out = []
    for path in paths:
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        if 100 * share < validation_percent:
            held_out.append(str(path))
        else:
            train[digest[4] % num_shards].append(str(path))
    shards = (
        Shard(f"stdlib-{i:02d}", "sources", members=tuple(own)) for i, own in enumerate(train)
    )
    return tuple(shards), (Shard("stdlib-validation", "sources", members=tuple(held_out)),)


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # Not even looked into: installed packages may be tens of thousands of files.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
