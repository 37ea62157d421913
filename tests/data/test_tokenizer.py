"""GPT-2 and byte tokenizers on real and hostile text."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import tiktoken

from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.recipe import VOCAB_SIZE

HOSTILE = [
    "",
    " ",
    "\n" * 50,
    "<|endoftext|>",
    "naïve 🦙 \U0010ffff",
    "tab\tand\x00nul",
    "\ud800 x",
]


def test_gpt2_equals_tiktoken_on_real_text(test_data, gpt2_cache):
    table = pq.ParquetFile(test_data / "corpus" / "validation.parquet").read_row_group(0)
    texts = table.column("text").to_pylist()[:40] + HOSTILE
    tokenizer = load_tokenizer("gpt2")
    reference = tiktoken.get_encoding("gpt2")
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokens.tolist() == reference.encode_ordinary(text)
        assert tokenizer.eot_id not in tokens
    assert tokenizer.decode(tokenizer.encode_batch(["a b"])[0].tolist()) == "a b"
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (VOCAB_SIZE["gpt2"], 50_256)


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    texts = ["", "abc", "naïve 🦙"]
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(tokens.tolist()) == text
    assert tokenizer.decode([97, 256]) == "a<|endoftext|>"
    assert tokenizer.vocab_size == VOCAB_SIZE["bytes"]


def test_unknown_tokenizer_is_named():
    with pytest.raises(ValueError, match=r"tokenizer 'bpe' is unknown; valid are gpt2, bytes"):
        load_tokenizer("bpe")
