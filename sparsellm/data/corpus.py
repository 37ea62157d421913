"""Corpora: a strict YAML (``data/*.yaml``) resolved into shards of training and validation text."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from sparsellm.paths import bundled
from sparsellm.strict import StrictModel, load_yaml, validate

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl"}


@dataclass(frozen=True)
class Shard:
    """A unit of text that is read on its own.

    ``url`` is a path or an fsspec URL; for ``sources`` it is a label and ``members`` are the files,
    each one document.
    """

    url: str
    format: Literal["parquet", "jsonl", "sources"]
    text_field: str = "text"
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """What a run reads. Shards are in a fixed order; the stream shuffles them."""

    name: str
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """Changes when a training shard is added, removed, renamed or (local files) resized."""
        digest = hashlib.sha256()
        for shard in self.train:
            parts = shard.members or (shard.url,)
            for part in parts:
                size = Path(part).stat().st_size if "://" not in part else 0
                digest.update(f"{Path(part).name} {size}\n".encode())
        return digest.hexdigest()[:16]


class HubCorpus(StrictModel):
    """A dataset on the Hugging Face hub, streamed."""

    description: str = Field("", description="One sentence for people")
    source: Literal["hub"]
    repo: str = Field(description="owner/name of the dataset")
    config: str = Field("default", description="Its configuration")
    split: str = Field("train", description="Its split")
    revision: str = Field(description="Commit or tag; pinned, so that a resumed run reads the same")
    text_field: str = Field("text", description="Column that holds the document")
    validation_shards: PositiveInt = Field(1, description="Last files, held out of training")


class FilesCorpus(StrictModel):
    """Parquet or JSONL files."""

    description: str = Field("", description="One sentence for people")
    source: Literal["files"]
    files: list[str] = Field(
        description="Globs of training files; ${NAME} is an environment variable"
    )
    validation_files: list[str] = Field([], description="Globs of held-out files")
    validation_shards: int = Field(
        0, ge=0, description="Last training files to hold out; in place of validation_files"
    )
    text_field: str = Field("text", description="Column or key that holds the document")


class StdlibCorpus(StrictModel):
    """The sources of Python's standard library, found at run time."""

    description: str = Field("", description="One sentence for people")
    source: Literal["stdlib"]
    validation_percent: float = Field(2, gt=0, lt=50, description="Files held out, % (by hash)")
    num_shards: PositiveInt = Field(16, description="Groups the training files are dealt into")


KINDS: dict[str, type[StrictModel]] = {
    "hub": HubCorpus,
    "files": FilesCorpus,
    "stdlib": StdlibCorpus,
}


def corpus_path(name_or_path: str) -> Path:
    """The file of a bundled corpus's name or of a path.

    Raises:
        FileNotFoundError: neither exists; the message lists the bundled names.
    """
    folder = bundled("data")
    for candidate in (Path(name_or_path), folder / f"{name_or_path}.yaml"):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise FileNotFoundError(
        f"corpus {name_or_path!r}: no such file, and no bundled corpus of that name; "
        f"bundled are {names}"
    )


def load_corpus(
    name_or_path: str,
    *,
    files: list[str] | None = None,
    validation_files: list[str] | None = None,
) -> Corpus:
    """Reads a corpus's YAML and finds its shards (hub: one request to the hub).

    Args:
        name_or_path: a file of ``data/`` by name, or a path.
        files: globs that replace the YAML's ``files``, and its ``validation_files`` by none.
        validation_files: globs that replace its ``validation_files``.

    Raises:
        FileNotFoundError: no such corpus, or a glob matches nothing.
        ValueError: a wrong key, an unset environment variable, an unknown file format.
    """
    path = corpus_path(name_or_path)
    content = load_yaml(path)
    if files is not None and "validation_files" in content:
        content["validation_files"] = []  # held out of other text
    overrides = {"files": files, "validation_files": validation_files}
    content |= {key: value for key, value in overrides.items() if value is not None}
    kind = content.get("source")
    if kind not in KINDS:
        raise ValueError(f"{path}: key 'source' is {kind!r}; valid are {', '.join(KINDS)}")
    config = validate(KINDS[kind], content, str(path))
    name = Path(name_or_path).stem
    if isinstance(config, HubCorpus):
        return _hub(name, config)
    if isinstance(config, FilesCorpus):
        return _files(name, config, str(path))
    assert isinstance(config, StdlibCorpus)
    return _stdlib(name, config)


def _hub(name: str, config: HubCorpus) -> Corpus:
    from datasets import load_dataset_builder

    from sparsellm.data.retry import with_retries

    builder = with_retries(
        lambda: load_dataset_builder(config.repo, config.config, revision=config.revision),
        f"the file list of {config.repo} ({config.config})",
    )
    urls = sorted(str(url) for url in builder.config.data_files[config.split])
    shards = [_shard(url, config.text_field) for url in urls]
    return _hold_out(name, shards, config.validation_shards)


def _files(name: str, config: FilesCorpus, source: str) -> Corpus:
    # Several globs may cover several layouts; together they must match something.
    train = _expand(config.files, source, "files")
    shards = [_shard(path, config.text_field) for path in train.values()]
    if config.validation_files:
        held_out = _expand(config.validation_files, source, "validation_files")
        overlap = held_out.keys() & train.keys()
        if overlap:
            path = min(held_out[file] for file in overlap)
            raise ValueError(f"{source}: {path} is in files and in validation_files")
        return Corpus(
            name,
            tuple(shards),
            tuple(_shard(path, config.text_field) for path in held_out.values()),
        )
    return _hold_out(name, shards, config.validation_shards)


def _hold_out(name: str, shards: list[Shard], count: int) -> Corpus:
    if count >= len(shards):
        raise ValueError(
            f"corpus {name}: validation_shards {count} of {len(shards)} files leaves no training"
        )
    split = len(shards) - count
    return Corpus(name, tuple(shards[:split]), tuple(shards[split:]))


def _expand(patterns: list[str], source: str, key: str) -> dict[str, str]:
    """The path of each file by what it is once links are followed, in the order of paths."""
    found: set[Path] = set()
    for pattern in patterns:
        expanded = os.path.expandvars(str(Path(pattern).expanduser()))
        if "$" in expanded:
            raise ValueError(
                f"{source}: {key} {pattern!r} names an environment variable that is not set; set "
                f"it, or give globs with --set 'data.{key}=[…]'"
            )
        # pathlib has no glob for a whole pattern, absolute or relative.
        found.update(Path(path) for path in glob.glob(expanded, recursive=True))  # noqa: PTH207
    if not found:
        raise FileNotFoundError(f"{source}: {key} {patterns} match no file")
    # A link keeps its name: in the hub's cache the file it leads to has neither format nor order.
    paths = sorted(str(path.parent.resolve() / path.name) for path in found)
    by_file: dict[str, str] = {}
    for path in paths:
        by_file.setdefault(os.path.realpath(path), path)
    return by_file


def _shard(url: str, text_field: str) -> Shard:
    suffix = Path(url).suffix
    if suffix not in FORMATS:
        raise ValueError(f"{url}: unknown format {suffix!r}; valid are {', '.join(FORMATS)}")
    return Shard(url, FORMATS[suffix], text_field)  # type: ignore[arg-type]


def _stdlib(name: str, config: StdlibCorpus) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not excluded & set(path.relative_to(root).parts) and path.stat().st_size
    )
    if len(paths) < 4 * config.num_shards:
        raise FileNotFoundError(
            f"{root} holds only {len(paths)} Python sources: this Python came without its standard "
            "library's text. Use data.corpus=local with files of your own"
        )
    train: list[list[str]] = [[] for _ in range(config.num_shards)]
    held_out = []
    for path in paths:
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        if 100 * share < config.validation_percent:
            held_out.append(str(path))
        else:
            train[digest[4] % config.num_shards].append(str(path))
    return Corpus(
        name,
        tuple(_sources(f"stdlib-{i:02d}", members) for i, members in enumerate(train)),
        (_sources("stdlib-validation", held_out),),
    )


def _sources(label: str, members: Iterable[str]) -> Shard:
    return Shard(label, "sources", members=tuple(members))
