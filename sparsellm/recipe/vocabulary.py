"""Tokenizers by their name in a recipe: vocabulary sizes, and the files of Hugging Face tokenizers.

`data.tokenizer` is ``gpt2``, ``bytes``, or ``hf:`` followed by a folder, a ``tokenizer.json``, or
an id on the hub, optionally with ``@revision`` (a commit, tag or branch).
"""

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
TOKEN_MAP_FILE = "special_tokens_map.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# Whatever a folder may have of its tokenizer, as patterns; the chat template is part of it.
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TOKEN_MAP_FILE, "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model"),
)
_REMEDY = "put the tokenizer's own file back"


def vocab_size(name: str) -> int:
    """Number of ids of a tokenizer, unpadded.

    Raises:
        FileNotFoundError, ValueError: unknown name, or its files are unavailable.
    """
    if name.startswith(HF_PREFIX):
        return count_ids(tokenizer_file(name))
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


def tokenizer_file(name: str) -> Path:
    """The ``tokenizer.json`` of an ``hf:`` tokenizer, in its folder or in the hub's cache.

    Raises:
        FileNotFoundError: there is no such folder or model, or it has no such file.
        ValueError: the hub cannot be reached, or refuses access.
    """
    path = tokenizer_folder(name)
    file = path / TOKENIZER_FILE
    if file.is_file():
        return file
    if path.parts[-2:-1] == ("snapshots",):  # of the hub's cache
        repo = name.removeprefix(HF_PREFIX)
        raise FileNotFoundError(
            f"data.tokenizer {name}: {repo} has no {TOKENIZER_FILE}: it has no fast tokenizer"
        )
    raise FileNotFoundError(
        f"data.tokenizer {name}: {path} has no {TOKENIZER_FILE}; `AutoTokenizer.from_pretrained(…)"
        ".save_pretrained(…)` writes one for any fast tokenizer"
    )


def tokenizer_folder(name: str) -> Path:
    """The folder of an ``hf:`` tokenizer, here or in the hub's cache.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the hub cannot be reached, has no such model, or refuses access.
    """
    where = name.removeprefix(HF_PREFIX)
    path = Path(where).expanduser()
    if path.is_file() and path.name == TOKENIZER_FILE:
        return path.parent
    if path.is_file():
        raise FileNotFoundError(
            f"data.tokenizer {name}: {path} is not called {TOKENIZER_FILE}; name a folder with a "
            f"{TOKENIZER_FILE} in Hugging Face's format, such as "
            "`AutoTokenizer.from_pretrained(…).save_pretrained(…)` writes"
        )
    if path.is_dir():
        return path
    repo = where.partition("@")[0]  # a revision may have slashes, as refs/pr/1
    if path.is_absolute() or where.startswith((".", "~")) or repo.count("/") > 1:
        raise FileNotFoundError(f"data.tokenizer {name}: there is no folder {path}")
    return _download(name, where)


@lru_cache
def _download(name: str, where: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = where.partition("@")
    patterns = [*TOKENIZER_FILES, CONFIG_FILE, GENERATION_FILE]
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"data.tokenizer {name}: no such folder, and not available from the hub ({first}); "
            "check the name, the network, and HF_TOKEN if access needs it"
        ) from error


def hf_end_of_document(name: str) -> str:
    """The end-of-text token of an ``hf:`` tokenizer: the one that its folder names.

    As in transformers, ``special_tokens_map.json`` counts before ``tokenizer_config.json`` unless
    that lists all added tokens. Where neither names one, it is the token at which transformers'
    generation stops, the first if there are several.

    Raises:
        ValueError: its files name none, or are damaged.
    """
    folder = tokenizer_folder(name)
    config, named = (_optional(folder / file) for file in (TOKENIZER_CONFIG_FILE, TOKEN_MAP_FILE))
    # As transformers decides: a newer configuration describes its tokens itself.
    for content in (config, named) if "added_tokens_decoder" in config else (named, config):
        token = content.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    # Some folders name it only by its id.
    tokenizer_json = read_tokenizer(tokenizer_file(name))
    for file in (GENERATION_FILE, CONFIG_FILE):
        ids = _optional(folder / file).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and (token := _token_of(tokenizer_json, first)) is not None:
            return token
    special = [
        entry["content"] for entry in tokenizer_json.get("added_tokens", ()) if entry.get("special")
    ]
    among = f" (its special tokens: {', '.join(special[:8])})" if special else ""
    raise ValueError(
        f"data.tokenizer {name} names no end-of-document token{among}: set eos_token in its "
        f"{TOKENIZER_CONFIG_FILE}"
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, _REMEDY) if path.is_file() else {}


def _token_of(content: dict[str, Any], token_id: int) -> str | None:
    """The token of an id in a ``tokenizer.json``."""
    for entry in content.get("added_tokens", ()):
        if entry["id"] == token_id:
            return str(entry["content"])
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        piece = vocabulary[token_id] if 0 <= token_id < len(vocabulary) else None
        return str(piece[0]) if isinstance(piece, list) and piece else None
    return next((token for token, value in vocabulary.items() if value == token_id), None)


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
        ValueError: it is damaged, or has BPE dropout. The library applies dropout to every text, so
            ids would differ from pass to pass, after resuming, and in each evaluation.
    """
    content = read_model(path, _TokenizerFile, _REMEDY)
    if dropout := content["model"].get("dropout"):
        raise ValueError(
            f"{path}: model.dropout is {dropout}, so the ids of a text are random, in training and "
            'in evaluation; set "dropout": null under "model"'
        )
    return content


class _AddedToken(BaseModel):
    id: NonNegativeInt
    content: str


class _TokenizerModel(BaseModel):
    vocab: dict[str, NonNegativeInt] | list[Any]


class _TokenizerFile(BaseModel):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []
