"""Tokenizers by their name in a recipe: vocabulary sizes, and the files of Hugging Face tokenizers.

`data.tokenizer` is ``gpt2``, ``bytes``, or ``hf:`` followed by a folder, a ``tokenizer.json``, or
an id on the hub, optionally with ``@revision`` (a commit or tag).
"""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt

from sparsellm.recipe.strict import read_json, read_model

# Unpadded. Constants, since loading a tokenizer only to count would download files.
VOCAB_SIZE = {"gpt2": 50_257, "bytes": 257}
HF_PREFIX = "hf:"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_REMEDY = "put the tokenizer's own file back"


def vocab_size(name: str) -> int:
    """Number of ids of a tokenizer, unpadded.

    Raises:
        FileNotFoundError, ValueError: unknown name, or its files are unavailable.
    """
    if name.startswith(HF_PREFIX):
        return count_ids(hf_file(name, TOKENIZER_FILE))
    check_name(name)
    return VOCAB_SIZE[name]


def check_name(name: str) -> str:
    """The name, if it is one.

    Raises:
        ValueError: it is not; the message has the valid ones.
    """
    if name in VOCAB_SIZE or (len(name) > len(HF_PREFIX) and name.startswith(HF_PREFIX)):
        return name
    raise ValueError(
        f"tokenizer {name!r} is unknown; valid are gpt2, bytes, and hf:ID_OR_PATH for a folder "
        "with a tokenizer.json, or the name of a model on the Hugging Face hub"
    )


@lru_cache
def hf_file(name: str, file: str) -> Path:
    """A file of an ``hf:`` tokenizer, from its folder or (cached) from the hub.

    Raises:
        FileNotFoundError: there is no such folder or model, or it has no such file.
        ValueError: the hub cannot be reached, or refuses access.
    """
    where = name.removeprefix(HF_PREFIX)
    path = Path(where).expanduser()
    if path.is_file() and path.name == TOKENIZER_FILE:
        path = path.parent
    elif path.is_file():
        raise FileNotFoundError(
            f"data.tokenizer {name}: {path} is not called {TOKENIZER_FILE}; name a folder with a "
            f"{TOKENIZER_FILE} in Hugging Face's format, such as "
            "`AutoTokenizer.from_pretrained(…).save_pretrained(…)` writes"
        )
    if path.is_dir():
        if not (path / file).is_file():
            raise FileNotFoundError(
                f"data.tokenizer {name}: {path} has no {file}; `AutoTokenizer.from_pretrained(…)"
                ".save_pretrained(…)` writes one for any fast tokenizer"
            )
        return path / file
    if path.is_absolute() or where.startswith((".", "~")) or where.count("/") > 1:
        raise FileNotFoundError(f"data.tokenizer {name}: there is no folder {path}")
    return _download(name, where, file)


def _download(name: str, where: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    repo, _, revision = where.partition("@")
    try:
        return Path(hf_hub_download(repo, file, revision=revision or None))
    except (OSError, HFValidationError, EntryNotFoundError) as error:
        # The client raises a subclass of it also if the hub cannot be reached.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise FileNotFoundError(
                f"data.tokenizer {name}: {repo} has no {file}: it has no fast tokenizer"
            ) from error
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"data.tokenizer {name}: no such folder, and not available from the hub ({first}); "
            "check the name, the network, and HF_TOKEN if access needs it"
        ) from error


def hf_end_of_document(name: str) -> str:
    """The end-of-text token of an ``hf:`` tokenizer.

    Raises:
        ValueError: its files name none.
    """
    config: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        config = read_json(hf_file(name, TOKENIZER_CONFIG_FILE), _REMEDY)
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    known = read_tokenizer(hf_file(name, TOKENIZER_FILE))
    added = {entry["content"] for entry in known.get("added_tokens", ())}
    for usual in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"):
        if usual in added:
            return usual
    raise ValueError(
        f"data.tokenizer {name} names no end-of-document token: set eos_token in its "
        f"{TOKENIZER_CONFIG_FILE}"
    )


@lru_cache
def count_ids(path: Path) -> int:
    """Number of ids of a ``tokenizer.json``: its largest id plus one.

    Raises:
        ValueError: it is damaged.
    """
    content = read_tokenizer(path)
    model = content["model"]["vocab"]
    # By id: some have gaps. Unigram's vocabulary is a list of (piece, score).
    ids = [len(model) - 1] if isinstance(model, list) else list(model.values())
    return max(*ids, *(entry["id"] for entry in content.get("added_tokens", ())), 0) + 1


def read_tokenizer(path: Path) -> dict[str, Any]:
    """The content of a ``tokenizer.json``.

    Raises:
        ValueError: it is damaged.
    """
    return read_model(path, _TokenizerFile, _REMEDY)


class _AddedToken(BaseModel):
    id: NonNegativeInt
    content: str


class _TokenizerModel(BaseModel):
    vocab: dict[str, NonNegativeInt] | list[Any]


class _TokenizerFile(BaseModel):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []
