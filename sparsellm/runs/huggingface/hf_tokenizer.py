"""``tokenizer.json`` and ``tokenizer_config.json``: our tokenizers in Hugging Face's format.

The GPT-2 tokenizer is built from tiktoken's ranks, so that the exported folder has exactly the
ids that the model was trained on. One difference is by design of the two libraries: a literal
``<|endoftext|>`` inside a text is ordinary text to training, and the special token to Hugging
Face's tokenizers unless they are called with ``split_special_tokens=True``.
"""

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer as HFTokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from sparsellm.data.tokenizer import (
    GPT2Tokenizer,
    Tokenizer,
    added_ids,
    load_tokenizer,
    without_special_pieces,
)
from sparsellm.recipe.strict import read_json
from sparsellm.recipe.vocabulary import (
    CONFIG_FILE,
    HF_PREFIX,
    TOKEN_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCAB_SIZE,
    hf_end_of_document,
    read_tokenizer,
    tokenizer_file,
    tokenizer_folder,
)
from sparsellm.runs import manifest
from sparsellm.runs.huggingface.hf_config import read_config
from sparsellm.runs.huggingface.hf_files import files_like, write_files
from sparsellm.runs.huggingface.hf_folder import (
    CHANGED,
    REMEDY,
    exported_tokenizer,
    is_export,
    is_published,
)
from sparsellm.waiting import warn

END_OF_TEXT = "<|endoftext|>"

_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
# What a tokenizer_config.json may say beside the names of special tokens.
_SETTINGS = {
    *("chat_template", "additional_special_tokens", "extra_special_tokens", "model_input_names"),
    *("padding_side", "truncation_side", "add_prefix_space", "clean_up_tokenization_spaces"),
}

# Any two tokenizers that are not the same differ on it: letters, digits, contractions, runs of
# white space, several bytes per character, and a special token (which both are told to split).
_PROBE = "It's 2,048 zeros —  naïve\n\n\t 日本語 🙂 don't\r\nx = [0]*99  "


def write_tokenizer(name: str, folder: Path, context_length: int) -> None:
    """Writes the files of a recipe's `data.tokenizer` into an existing folder, as training used it.

    No special token is added to a text, and a text begins after the end-of-document token. The chat
    template and the other special tokens of an ``hf:`` tokenizer are as in its folder.
    Texts of more than ``context_length`` tokens make Hugging Face's tokenizers warn.
    """
    end_of_document, settings = END_OF_TEXT, dict[str, Any]()
    if name.startswith(HF_PREFIX):
        source = tokenizer_folder(name)
        end_of_document = hf_end_of_document(name)
        content = without_special_pieces(read_tokenizer(source / TOKENIZER_FILE), end_of_document)
        content |= {"post_processor": None, "truncation": None, "padding": None}
        (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        settings = _settings(source, content)
        write_files(folder, files_like(source, _TEMPLATES))
    else:
        build_tokenizer(name).save(str(folder / TOKENIZER_FILE))
        # As GPT-2's: nothing is unknown, but some tools ask for one.
        settings = {"unk_token": end_of_document}
    config = {
        # For batches: padding is masked, and generation needs it on the left.
        "pad_token": end_of_document,
        "padding_side": "left",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **settings,
        # Reads tokenizer.json as it is. A class of its own (GPT2Tokenizer) would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "model_max_length": context_length,
    }
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _settings(source: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The settings in a tokenizer's folder that do not change the ids of a text.

    A special token is named if ``content``, its ``tokenizer.json``, has it.
    """
    stated: dict[str, Any] = {}
    for file in (TOKENIZER_CONFIG_FILE, TOKEN_MAP_FILE):
        if (source / file).is_file():
            stated |= read_json(source / file, "put the tokenizer's own file back")
    vocabulary = content["model"]["vocab"]
    pieces = (piece[0] for piece in vocabulary) if isinstance(vocabulary, list) else vocabulary
    token_texts = {entry["content"] for entry in content.get("added_tokens", ())}.union(pieces)
    tokens = {key: value for key, value in stated.items() if key.endswith("_token")}
    spelt = {key: v.get("content") if isinstance(v, dict) else v for key, v in tokens.items()}
    return {
        **{key: value for key, value in stated.items() if key in _SETTINGS and value is not None},
        **{
            key: tokens[key]
            for key, text in spelt.items()
            if isinstance(text, str) and text in token_texts
        },
    }


def without_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, which puts no special token after a text; a copy if another one did."""
    backend: HFTokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not added_ids(backend)[1]:
        return tokenizer
    before = [(backend.id_to_token(token), token) for token in added_ids(backend)[0]]
    copied = copy.deepcopy(tokenizer)
    copied.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(text for text, _ in before), "$A"], special_tokens=list(dict.fromkeys(before))
    )
    return copied


def added_around(name: str) -> str:
    """What the post-processor in the folder of an ``hf:`` tokenizer makes of a text, such as
    ``<s> …``; empty if it adds nothing."""
    if not name.startswith(HF_PREFIX):
        return ""
    tokenizer = HFTokenizer.from_file(str(tokenizer_file(name)))
    before, after = ([str(tokenizer.id_to_token(i)) for i in ids] for ids in added_ids(tokenizer))
    return " ".join([*before, "…", *after]) if before or after else ""


def stock_tokenizer(
    name: str, context_length: int = VERY_LARGE_INTEGER, **options: Any
) -> PreTrainedTokenizerBase:
    """A recipe's `data.tokenizer` as transformers reads it from an export of what was trained here.

    Options are those of transformers' tokenizer, such as ``split_special_tokens``.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(name, Path(folder), context_length)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.name_or_path = name
    return tokenizer


def folder_tokenizer(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, with the ids of its ``tokenizer.json``.

    That is `AutoTokenizer`'s, unless `auto_tokenizer_agrees` is false: then the file is read as it
    is, and a warning says so. Options are those of transformers' tokenizer.

    Raises:
        Exception: of many kinds, where transformers cannot read it.
    """
    stock, plain = _stock_and_plain(folder, **options)
    if plain is None or _same_ids(stock, plain):
        return stock
    warn(
        f"{folder}: AutoTokenizer of transformers rebuilds such a tokenizer and gives other ids "
        f"than {TOKENIZER_FILE}. The ids of the file are used here, as in training "
        "(PreTrainedTokenizerFast.from_pretrained reads it as it is)"
    )
    return plain


def auto_tokenizer_agrees(folder: Path) -> bool:
    """Whether `AutoTokenizer` gives the ids of a folder's ``tokenizer.json``.

    For some classes of tokenizers and types of models (GPT2Tokenizer, Qwen2), transformers 5 takes
    the vocabulary of that file and replaces the rest.
    """
    stock, plain = _stock_and_plain(folder)
    return plain is None or _same_ids(stock, plain)


def _stock_and_plain(
    folder: Path, **options: Any
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase | None]:
    """AutoTokenizer's, and that of ``tokenizer.json`` as it is, where that may be another."""
    is_stock = not (folder / CONFIG_FILE).is_file() or not is_published(folder)
    config = None if is_stock else read_config(folder)
    stock = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, **options)
    if type(stock) is PreTrainedTokenizerFast or not (folder / TOKENIZER_FILE).is_file():
        return stock, None
    # A class may name special tokens that the folder does not.
    named = stock.special_tokens_map
    return stock, PreTrainedTokenizerFast.from_pretrained(folder, **named, **options)


def _same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers of one vocabulary agree on the text of each token, and on a probe."""
    every = [[token] for token in range(len(other))]
    texts = other.backend_tokenizer.decode_batch(every, skip_special_tokens=False)
    # The probe with the special tokens that are added around a text.
    return all(
        _ids(one, batch, special) == _ids(other, batch, special)
        for batch, special in (([_PROBE], True), (texts, False))
    )


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer(texts, add_special_tokens=special).input_ids)
    backend.no_truncation()
    backend.no_padding()
    encode = backend.encode_batch_fast  # without offsets
    return [encoding.ids for encoding in encode(texts, add_special_tokens=special)]


class _Ranks(TikTokenConverter):  # type: ignore[misc]
    """Converts ranks that are in memory; transformers would read them from a file."""

    def load_tiktoken_bpe(self, ranks: dict[bytes, int]) -> dict[bytes, int]:
        return ranks


@functools.cache  # GPT-2's takes seconds
def build_tokenizer(name: str) -> HFTokenizer:
    """Hugging Face's equal of ``gpt2`` or ``bytes``, id for id.

    Raises:
        ValueError: tiktoken cannot get the GPT-2 vocabulary.
    """
    ranks = {bytes([value]): value for value in range(256)}
    if name == "gpt2":
        ranks = GPT2Tokenizer().mergeable_ranks
    vocabulary, merges = _Ranks().extract_vocab_merges_from_model(ranks)
    # As tiktoken does, a word that is a token is not merged from its letters.
    tokenizer = HFTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    # With its regular expression this splits as GPT-2 does; bytes need no splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=name == "gpt2"
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE[name]
    return tokenizer


def check_identity(path: Path, name: str) -> None:
    """Compares an ``hf:`` tokenizer with the one of a checkpoint's training, or of an export.

    Raises:
        FileNotFoundError, ValueError: it is gone, or another one now.
    """
    tokenizer = load_tokenizer(name)
    if is_export(path):
        recorded, remedy = exported_tokenizer(path), REMEDY
    else:
        first = manifest.files_like(path, "rank_*.json")[:1]
        saved = {
            key: value for file in first for key, value in read_json(file, manifest.REMEDY).items()
        }
        recorded = {"identity": saved.get("tokenizer"), "eot_id": saved.get("eot_id")}
        remedy = "put the tokenizer's own files back"
    now = {"identity": tokenizer.identity, "eot_id": tokenizer.eot_id}
    if any(value is not None and now[key] != value for key, value in recorded.items()):
        raise ValueError(
            f"{path} was trained with another tokenizer than {name} is now: it gives other ids, or "
            f"documents end with another one; {remedy}"
        )


def check_tokenizer(folder: Path, expected: Tokenizer) -> None:
    """Compares a folder's ``tokenizer.json``, if there is one, with the recipe's tokenizer.

    Raises:
        ValueError: it is damaged, or gives other ids.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return
    tokenizer = load_tokenizer(f"{HF_PREFIX}{folder}")
    actual, required = (
        (t.vocab_size, t.eot_id, t.encode_batch([_PROBE])[0].tolist())
        for t in (tokenizer, expected)
    )
    if actual != required:
        raise ValueError(
            f"{path} ({actual[0]:,} ids, end of document {actual[1]}) is not the recipe's "
            f"tokenizer {expected.name!r} ({required[0]:,} ids, end of document {required[1]}); "
            f"give a recipe with that data.tokenizer; {CHANGED}"
        )
