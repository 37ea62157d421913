"""Turns globs, folders, addresses and Python's standard library into shards."""

import glob
import hashlib
import logging
import math
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import fsspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sparsellm.data.text.network import with_retries

logger = logging.getLogger(__name__)
Content = TypeVar("Content", str, NDArray[np.integer])

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".bin": "tokens",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}  # pyarrow's names
COMPRESSIBLE = ("jsonl", "text")
HAVE_FIELDS = ("parquet", "jsonl")  # of whose rows one column or key is the text
_MOST_NAMED = 3  # files that are left out
_MOST_MOVED = 1000  # characters by which the place to divide a text moves to white space
# Folders of the standard library that are not read.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Shard:
    """A unit of text that is read on its own.

    ``url`` is a path or an fsspec URL; for ``sources`` it is a label and ``members`` are the files,
    each one document.
    """

    url: str
    format: str  # of FORMATS, or "sources"
    text_field: str = "text"
    compression: str | None = None
    members: tuple[str, ...] = ()
    separator: str | None = None  # between the documents of a text file; None: it is one document
    part: tuple[float, float] = (0.0, 1.0)  # (a, b): documents whose hash h has a ≤ h < b
    # (h, a, b): of a document with hash h only what lies between these shares of its length.
    divided: tuple[float, float, float] | None = None

    @property
    def is_part(self) -> bool:
        """Whether only some of the documents are read, chosen by their hashes."""
        return self.part != (0.0, 1.0)

    @property
    def is_file(self) -> bool:
        """Whether ``url`` is a file's, and not a label of several ones."""
        return self.members in ((), (self.url,))

    def portion(self, document: Content) -> Content:
        """What of a document is in `part`; its text or ids alone decide, so this never changes."""
        if not self.is_part:
            return document
        place = document_hash(document)
        if not self.part[0] <= place < self.part[1]:
            return document[:0]
        if self.divided and place == self.divided[0]:
            return _between(document, *self.divided[1:])
        return document

    def shares_documents(self, other: "Shard") -> bool:
        """Whether some document of the same text would be in this shard and in ``other``."""
        begin = max(self.part[0], other.part[0])
        end = min(self.part[1], other.part[1])
        if self.divided and other.divided and end == math.nextafter(begin, 1):
            (_, *share), (_, *other_share) = self.divided, other.divided
            return max(share[0], other_share[0]) < min(share[1], other_share[1])
        return begin < end


def document_hash(document: str | NDArray[np.integer]) -> float:
    """A number from 0 to 1 that follows from a document's text, or from its ids."""
    if isinstance(document, str):
        data = document.encode("utf-8", "replace")
    else:
        data = document.astype(np.int32).tobytes()
    return xxhash.xxh3_64_intdigest(data) / 2**64


def _between(document: Content, begin: float, end: float) -> Content:
    """A document between two shares of its length; text is cut after white space if it has some."""

    def place(share: float) -> int:
        at = int(len(document) * share)
        if not isinstance(document, str) or share == 1:
            return at
        space = max(document.rfind(sign, max(at - _MOST_MOVED, 0), at) for sign in " \n\t")
        return space + 1 if space >= 0 else at

    piece = document[place(begin) : place(end)]
    if isinstance(document, str) or end == 1:
        return piece
    return np.append(piece, document[-1:])  # each document of ids ends with its end-of-document id


def expand(patterns: list[str], where: str, option: str) -> dict[str, str]:
    """The files to which globs, folders and addresses refer, in the order of their paths.

    Args:
        patterns: ``${NAME}`` and ``~`` are expanded; a folder stands for the files below it, see
            `_in_folder`; ``scheme://…`` goes through fsspec, ``file://`` is a path.
        where: says in errors where the patterns were given.
        option: how a command is given such patterns, such as ``--data GLOB``.

    Returns:
        the path of each file by what it is once links are followed.

    Raises:
        FileNotFoundError: they match nothing, or a path without wildcards does not exist.
        ValueError: an environment variable is not set, or one of them is not a regular file.
    """
    matches: set[str] = set()
    expanded_patterns: list[str] = []
    for pattern in patterns:
        expanded = os.path.expandvars(pattern)
        if re.search(r"\$\w|\$\{", expanded):
            raise ValueError(
                f"{where}: {pattern!r} names an environment variable that is not set; set "
                f"it, or give globs with {option}"
            )
        if "://" not in expanded:
            expanded = str(Path(expanded).expanduser())
        paths = with_retries(partial(_find, expanded.removeprefix("file://")), pattern)
        # Some of several globs may match nothing, but a path without wildcards must exist.
        if not paths and not glob.has_magic(expanded):
            is_folder = "://" in expanded or Path(expanded).is_dir()
            if is_folder:
                raise FileNotFoundError(
                    f"{where}: {expanded} has no Parquet, JSON Lines or .txt file; name others by "
                    f"a glob, such as '{expanded}/*.md'"
                )
            raise FileNotFoundError(
                f"{where}: {expanded} does not exist; correct the path, or leave it out"
            )
        expanded_patterns.append(expanded)
        matches.update(paths)
    if not matches:
        raise FileNotFoundError(
            f"{where}: {expanded_patterns} match no file; give others with {option}"
        )
    by_file: dict[str, str] = {}
    for path in sorted(matches):
        by_file.setdefault(real_place(path), path)
    return by_file


def real_place(url: str) -> str:
    """An address, or a local path once links are followed: equal for the same file."""
    return url if "://" in url else os.path.realpath(url)


def _find(pattern: str) -> list[str]:
    file_system, path = fsspec.core.url_to_fs(pattern)
    is_local = "://" not in pattern
    files: list[str] = []
    # A path that exists is meant, though its name has brackets.
    is_glob = glob.has_magic(path) and not (is_local and Path(path).exists())
    for place in file_system.glob(path) if is_glob else [path]:
        if file_system.isdir(place):
            files += _in_folder(place, file_system.find(place))
        elif is_local:
            files += _regular(Path(place))
        else:
            files.append(place)
    if not is_local:
        return [file_system.unstrip_protocol(file) for file in files]
    # A link keeps its name: the files that the hub's cache links to have no suffix and no order.
    return [str(Path(file).parent.resolve() / Path(file).name) for file in files]


def _regular(path: Path) -> list[str]:
    """The path of a file that can be read twice; nothing if there is none."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to {path.readlink()}, which does not exist; correct it, or leave it "
            "out"
        )
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is not a regular file (a pipe or device cannot be read twice); write its "
            "content to a file"
        )
    return [str(path)] if path.exists() else []


def _in_folder(folder: str, files: Iterable[str]) -> list[str]:
    """The files of a known format that, by their names, are neither hidden nor being written.

    Names with a leading ``.`` or ``_`` are of hidden files and of those that a writer has not
    finished (Spark's, Hadoop's). A ``.md`` among data describes it; a glob can ask for it.
    """
    data_files: list[str] = []
    skipped_files: list[str] = []
    files = list(files)
    described = [Path(file) for file in files if _format(file)[0] == "tokens"]
    beside = {str(path.with_suffix(end)) for path in described for end in (".idx", ".json")}
    for file in files:
        if file in beside:  # they say what the tokens are, and are read with them
            continue
        names = Path(file.removeprefix(folder)).parts
        visible = not any(name.startswith((".", "_")) for name in names)
        is_data = _format(file)[0] and Path(file).suffix.lower() != ".md"
        (data_files if visible and is_data else skipped_files).append(file)
    if skipped_files:
        more = (
            ""
            if len(skipped_files) <= _MOST_NAMED
            else f" and {len(skipped_files) - _MOST_NAMED} more"
        )
        shown = ", ".join(
            file.removeprefix(folder).strip("/") for file in skipped_files[:_MOST_NAMED]
        )
        warn_once(f"not read in folder {folder}: {shown}{more} (a glob can name them)")
    return data_files


@cache  # a run lists its files before torch is loaded, and again when it reads them
def warn_once(message: str) -> None:
    """Warns, unless the same has been said."""
    logger.warning(message)


def to_shard(url: str, text_field: str, separator: str | None = None) -> Shard:
    """The shard of a file, by its name; ``separator`` is of text files.

    Raises:
        ValueError: its format is unknown.
    """
    kind, compression = _format(url)
    if kind is None:
        raise ValueError(
            f"{url}: unknown format; valid are {', '.join(FORMATS)}, and .jsonl and .txt with "
            f"{', '.join(COMPRESSIONS)}. Convert it to Parquet: with `datasets`, load_dataset (of "
            "what save_to_disk wrote, load_from_disk), then to_parquet"
        )
    if kind == "text":
        return Shard(url, "sources", text_field, compression, (url,), separator)
    return Shard(url, kind, text_field, compression)


def _format(name: str) -> tuple[str | None, str | None]:
    """Format and compression by the end of a file's name."""
    path = Path(name)
    suffix = path.suffix
    compression = COMPRESSIONS.get(suffix.lower())
    if compression:
        suffix = path.with_suffix("").suffix
    kind = FORMATS.get(suffix.lower())
    if compression and kind not in COMPRESSIBLE:
        return None, None
    return kind, compression


@cache  # likewise
def stdlib_shards(
    validation_percent: float, num_shards: int
) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Python's standard library, which every installation has: training and held-out files.

    A file's place follows from its path.

    Raises:
        FileNotFoundError: this Python has no sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        # Not even looked into: installed packages may be tens of thousands of files.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = sorted(path for path in paths if path.stat().st_size)
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
        Shard(f"stdlib-{i:02d}", "sources", members=tuple(members))
        for i, members in enumerate(train)
    )
    return tuple(shards), (Shard("stdlib-validation", "sources", members=tuple(held_out)),)
