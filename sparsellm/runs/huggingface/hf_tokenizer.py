"""``tokenizer.json`` and ``tokenizer_config.json``: our tokenizers in Hugging Face's format.

The GPT-2 tokenizer is built from tiktoken's ranks, so that the exported folder has exactly the
ids that the model was trained on. One difference is by design of the two libraries: a literal
``<|endoftext|>`` inside a text is ordinary text to training, and the special token to Hugging
Face's tokenizers unless they are called with ``split_special_tokens=True``.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as HFTokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from sparsellm.data.tokenizer import (
    GPT2Tokenizer,
    Tokenizer,
    load_tokenizer,
    without_special_pieces,
)
from sparsellm.recipe.vocabulary import (
    HF_PREFIX,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCAB_SIZE,
    hf_end_of_document,
    hf_file,
    read_tokenizer,
)

END_OF_TEXT = "<|endoftext|>"

# Any two tokenizers that are not the same differ on it: letters, digits, contractions, runs of
# white space, several bytes per character, and a special token (which both are told to split).
_PROBE = "It's 2,048 zeros —  naïve\n\n\t 日本語 🙂 don't\r\nx = [0]*99  "


def write_tokenizer(name: str, folder: Path, context_length: int) -> None:
    """Writes the two files of a recipe's `data.tokenizer` into an existing folder.

    Texts of more than ``context_length`` tokens make Hugging Face's tokenizers warn.
    """
    end_of_document = END_OF_TEXT
    if name.startswith(HF_PREFIX):
        content = without_special_pieces(read_tokenizer(hf_file(name, TOKENIZER_FILE)))
        # Training adds no special token to a text; its post-processor may.
        content |= {"post_processor": None, "truncation": None, "padding": None}
        (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        end_of_document = hf_end_of_document(name)
    else:
        build_tokenizer(name).save(str(folder / TOKENIZER_FILE))
    config = {
        # Reads tokenizer.json as it is. A class of its own (GPT2Tokenizer) would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        # For batches: padding is masked, and generation needs it on the left.
        "pad_token": end_of_document,
        "padding_side": "left",
        "unk_token": end_of_document,  # as GPT-2's: nothing is unknown, but some tools ask for one
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context_length,
    }
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def stock_tokenizer(
    name: str, context_length: int = VERY_LARGE_INTEGER, **options: Any
) -> PreTrainedTokenizerBase:
    """A recipe's `data.tokenizer` as transformers reads it from an export.

    Options are those of transformers' tokenizer, such as ``split_special_tokens``.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(name, Path(folder), context_length)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.name_or_path = name
    return tokenizer


@functools.cache  # an export asks twice: for its card and for its last lines
def auto_tokenizer_agrees(name: str, model_type: str) -> bool:
    """Whether `AutoTokenizer` gives the ids of a recipe's tokenizer beside a model of this type.

    For some types, Qwen2 among them, transformers 5 takes the vocabulary of ``tokenizer.json`` and
    replaces the rest, whatever class the folder names.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(name, Path(folder), VERY_LARGE_INTEGER)
        own = AutoTokenizer.from_pretrained(folder)
        no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = json.dumps({"model_type": model_type, **no_ids})
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        found = AutoTokenizer.from_pretrained(folder)
    return bool(found(_PROBE).input_ids == own(_PROBE).input_ids)


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


def check_tokenizer(folder: Path, expected: Tokenizer) -> None:
    """Compares a folder's ``tokenizer.json``, if there is one, with the recipe's tokenizer.

    Raises:
        ValueError: it is damaged, or gives other ids.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return
    found = load_tokenizer(f"{HF_PREFIX}{folder}")
    own, wanted = (
        (t.vocab_size, t.eot_id, t.encode_batch([_PROBE])[0].tolist()) for t in (found, expected)
    )
    if own != wanted:
        raise ValueError(
            f"{path} ({own[0]:,} ids, end of document {own[1]}) is not the recipe's tokenizer "
            f"{expected.name!r} ({wanted[0]:,} ids, end of document {wanted[1]}); give a recipe "
            "with that data.tokenizer, or export the checkpoint again"
        )
