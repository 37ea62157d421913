"""Corpora: a strict YAML (``data/*.yaml``) resolved into shards of training and validation text."""

from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sparsellm.data.text.division import check_apart, hold_out
from sparsellm.data.text.identity import fingerprint, witness
from sparsellm.data.text.network import with_retries
from sparsellm.data.text.shards import HAVE_FIELDS, Shard, expand, stdlib_shards, to_shard
from sparsellm.paths import bundled, named_file
from sparsellm.recipe.sections import DataConfig
from sparsellm.recipe.strict import Globs, StrictModel, load_yaml, validate


@dataclass(frozen=True)
class Corpus:
    """The shards that a run reads, in a fixed order; the stream shuffles them."""

    name: str
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    weight: float = 1.0  # its share of the tokens, relative to the other corpora's weights

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a training shard is added, removed, renamed or changed."""
        return fingerprint(self.train)

    @cached_property
    def held_out(self) -> str:
        """The same for the held-out shards."""
        return fingerprint(self.validation)

    @property
    def text_id(self) -> str:
        """Changes when a training or a held-out shard does."""
        return f"{self.fingerprint} {self.held_out}"

    @cached_property
    def witness(self) -> str | None:
        """Changes also on edits that leave the fingerprint unchanged; see identity.py."""
        return witness(self.train)


HELD_OUT_KEYS = ("validation_files", "validation_shards", "validation_fraction")


class HubCorpus(StrictModel):
    """A dataset on the Hugging Face hub, streamed."""

    description: str = Field("", description="One sentence for people")
    source: Literal["hub"]
    repo: str = Field(description="owner/name of the dataset")
    config: str = Field("default", description="Its configuration")
    split: str = Field("train", description="Its split")
    revision: str = Field(description="Commit or tag; pinned, so that a resumed run reads the same")
    text_field: str = Field("text", description="Column that holds the document")
    language: str | None = Field(None, description="ISO 639-1, for the card of a model")
    validation_shards: PositiveInt = Field(1, description="Last files, held out of training")


class FilesCorpus(StrictModel):
    """Files of text or tokens, local or at an address."""

    description: str = Field("", description="One sentence for people")
    source: Literal["files"]
    files: Globs = Field(
        description="Globs, folders or addresses of training files; ${NAME} is an environment "
        "variable"
    )
    validation_files: Globs = Field([], description="The same for held-out files")
    validation_shards: int = Field(
        0, ge=0, description="Last training files to hold out; in place of validation_files"
    )
    validation_fraction: float = Field(
        0, ge=0, lt=1, description="Share of the documents to hold out, by a hash of their text"
    )
    text_field: str = Field("text", description="Column or key that holds the document")
    document_separator: str | None = Field(
        None, min_length=1, description="What stands between the documents of a .txt file"
    )

    @model_validator(mode="after")
    def _held_out_one_way(self) -> Self:
        set_keys = [key for key in HELD_OUT_KEYS if getattr(self, key)]
        if len(set_keys) > 1:
            raise ValueError(
                f"{' and '.join(set_keys)} each say what is held out: keep one of them"
            )
        return self


class StdlibCorpus(StrictModel):
    """The sources of Python's standard library, found at run time."""

    description: str = Field("", description="One sentence for people")
    source: Literal["stdlib"]
    validation_percent: float = Field(
        2, gt=0, lt=50, description="Percentage of files held out (by hash)"
    )
    num_shards: PositiveInt = Field(16, description="Number of groups of training files")


class MixtureCorpus(StrictModel):
    """Several corpora, in proportion to their weights."""

    description: str = Field("", description="One sentence for people")
    source: Literal["mixture"]
    corpora: dict[str, PositiveFloat] = Field(
        min_length=1, description="Share of the tokens of each corpus, by its name or YAML file"
    )


KINDS: dict[str, type[StrictModel]] = {
    "hub": HubCorpus,
    "files": FilesCorpus,
    "stdlib": StdlibCorpus,
    "mixture": MixtureCorpus,
}


def corpus_path(name_or_path: str) -> Path:
    """The file that the name of a bundled corpus, or a path, refers to.

    Raises:
        FileNotFoundError: neither exists; the message lists the bundled names.
    """
    remedy = "; to read text of your own: --set 'data.files=[FOLDER]'"
    return named_file("corpus", name_or_path, bundled("data"), remedy=remedy)


def hub_sources(corpus: str | dict[str, float]) -> list[HubCorpus]:
    """The datasets of the hub that a recipe's corpus, or mixture of corpora, reads.

    A corpus whose file is missing, as on a machine that did not train the model, is omitted.
    """
    hub_corpora: list[HubCorpus] = []
    for name in [corpus] if isinstance(corpus, str) else corpus:
        try:
            path = corpus_path(name)
        except FileNotFoundError:
            continue
        content = load_yaml(path)
        if content.get("source") == "hub":
            hub_corpora.append(validate(HubCorpus, content, path))
        elif content.get("source") == "mixture":
            hub_corpora += hub_sources(validate(MixtureCorpus, content, path).corpora)
    return hub_corpora


def load_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """The corpora of a recipe's `data`, with their weights; a single one unless it is a mixture.

    Raises:
        FileNotFoundError, ValueError: as `load_corpus`, or a key of `data` would have no effect.
    """
    weights = data.corpus
    usual = DataConfig.model_fields["validation_fraction"].default
    if not data.files and data.validation_fraction != usual:
        raise ValueError(
            f"data.validation_fraction {data.validation_fraction:g} has no effect without "
            "data.files, since a corpus holds out what its own YAML file says: set it there, and "
            f"leave data.validation_fraction at {usual}"
        )
    if isinstance(weights, str):
        path = corpus_path(weights)
        content = load_yaml(path)
        if content.get("source") != "mixture":
            return (single_corpus(data),)
        weights = validate(MixtureCorpus, content, path).corpora
    if data.files or data.validation_files or data.text_field or data.document_separator:
        raise ValueError(
            "data.files, data.validation_files, data.text_field and data.document_separator apply "
            "to a single corpus; in a mixture give each a YAML file of its own"
        )
    corpora = tuple(replace(load_corpus(name), weight=w) for name, w in weights.items())
    names = [c.name for c in corpora]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two corpora of the mixture are called {max(names, key=names.count)!r}: copy the YAML "
            "file of one to another name"
        )
    stdlib = [c.name for c in corpora if c.train[0].format == "sources" and not c.train[0].is_file]
    if len(stdlib) > 1:  # one may hold out what the other trains on
        raise ValueError(
            f"the corpora {', '.join(stdlib)} of the mixture all read Python's standard library; "
            "keep one of them"
        )
    check_apart([(c.name, c.train, c.validation) for c in corpora])
    return corpora


def single_corpus(data: DataConfig) -> Corpus:
    """The corpus of a recipe's `data`.

    Raises:
        FileNotFoundError, ValueError: as `load_corpus`, or it is a mixture.
    """
    instead = {"files", "validation_files", "validation_fraction", "text_field"}
    instead |= {"document_separator"}
    return load_corpus(str(data.corpus), **data.model_dump(include=instead))


def text_format(data: DataConfig) -> tuple[str, str | None]:
    """The column or key that holds a recipe's text, and what separates its documents in .txt files.

    The usual ones for a mixture, and where the corpus's file is missing.
    """
    content: dict[str, Any] = {}
    if isinstance(data.corpus, str):
        with suppress(FileNotFoundError):
            content = load_yaml(corpus_path(data.corpus))
    separator = data.document_separator or content.get("document_separator")
    return data.text_field or content.get("text_field") or "text", separator


def load_corpus(name_or_path: str, *, validation_fraction: float = 0, **instead: Any) -> Corpus:
    """Reads a corpus's YAML, in ``data/`` or at a path, and finds its shards.

    For a corpus on the hub it asks the hub, once.

    Args:
        name_or_path: see `corpus_path`.
        validation_fraction: share of the documents of other ``files`` to hold out, unless there are
            validation files or shards.
        instead: what replaces the YAML's own ``files`` (its ``validation_files`` are then left
            out), ``validation_files`` (in place of the documents or files that the YAML holds out),
            ``text_field`` and ``document_separator``; None replaces nothing.

    Raises:
        FileNotFoundError: the corpus does not exist, or a glob matches nothing.
        ValueError: a wrong key, an unset environment variable, an unknown file format.
    """
    path = corpus_path(name_or_path)
    content = load_yaml(path)
    replacements = {key: value for key, value in instead.items() if value is not None}
    if "files" in replacements:
        content.pop("validation_files", None)  # they were held out of the files that are replaced
        if not content.get("validation_shards"):
            content["validation_fraction"] = validation_fraction
    if "validation_files" in replacements:
        for key in HELD_OUT_KEYS:
            content.pop(key, None)
    content |= replacements
    kind = content.get("source")
    if kind not in KINDS:
        is_now = "missing" if kind is None else repr(kind)
        raise ValueError(f"{path}: key 'source' is {is_now}; valid are {', '.join(KINDS)}")
    for key in replacements:
        if key not in KINDS[kind].model_fields:
            raise ValueError(
                f"data.{key} does not apply to data.corpus {name_or_path}, whose source is "
                f"{kind!r}; to read files of your own set data.corpus to local"
            )
    config = validate(KINDS[kind], content, path)
    name = Path(name_or_path).stem
    if isinstance(config, HubCorpus):
        return _hub(name, config)
    if isinstance(config, FilesCorpus):
        corpus = _files(name, config, path, replacements.keys())
        check_apart([(name, corpus.train, corpus.validation)])
        return corpus
    if isinstance(config, StdlibCorpus):
        return Corpus(name, *stdlib_shards(config.validation_percent, config.num_shards))
    raise ValueError(f"{path} is a mixture of corpora; name a single corpus of it here")


def _hub(name: str, config: HubCorpus) -> Corpus:
    from datasets import load_dataset_builder

    builder = with_retries(
        lambda: load_dataset_builder(config.repo, config.config, revision=config.revision),
        f"the file list of {config.repo} ({config.config})",
    )
    urls = sorted(str(url) for url in builder.config.data_files[config.split])
    shards = tuple(to_shard(url, config.text_field) for url in urls)
    return _hold_out(name, shards, config.validation_shards)


def _files(name: str, config: FilesCorpus, path: Path, replaced_keys: Set[str]) -> Corpus:
    """``replaced_keys``: the keys of the YAML at ``path`` that the recipe's ``data`` replaces."""

    def files_of(key: str, patterns: list[str]) -> dict[str, str]:
        where = f"data.{key}" if key in replaced_keys else f"{path}: {key}"
        # So that the YAML and its files can be moved together.
        corpus_folder = str(path.resolve().parent)
        patterns = [pattern.replace("${CORPUS_DIR}", corpus_folder) for pattern in patterns]
        return expand(patterns, where, f"--set 'data.{key}=[…]'")

    # Several globs may cover several layouts; together they must match something.
    train = files_of("files", config.files)
    separator = config.document_separator

    def shards_of(files: dict[str, str]) -> tuple[Shard, ...]:
        return tuple(to_shard(url, config.text_field, separator) for url in files.values())

    shards = shards_of(train)
    if separator and all(shard.format != "sources" for shard in shards):
        raise ValueError(
            f"document_separator {separator!r} is for .txt files, and corpus {name} has none: in "
            "others each row is one document"
        )
    if "text_field" in replaced_keys and all(s.format not in HAVE_FIELDS for s in shards):
        raise ValueError(
            f"data.text_field is for Parquet and JSON Lines, and corpus {name} has none: set it to "
            "null"
        )
    if config.validation_fraction:
        return Corpus(name, *hold_out(shards, config.validation_fraction))
    if config.validation_files:
        held_out = files_of("validation_files", config.validation_files)
        overlap = held_out.keys() & train.keys()
        if overlap:
            shared_file = min(held_out[file] for file in overlap)
            raise ValueError(f"{path}: {shared_file} is in files and in validation_files")
        return Corpus(name, shards, shards_of(held_out))
    return _hold_out(name, shards, config.validation_shards)


def _hold_out(name: str, shards: tuple[Shard, ...], count: int) -> Corpus:
    if count >= len(shards):
        raise ValueError(
            f"corpus {name}: validation_shards {count} of {len(shards)} files leaves no training"
        )
    split = len(shards) - count
    return Corpus(name, shards[:split], shards[split:])
