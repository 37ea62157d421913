"""GPT-2 and byte tokenizers on real and hostile text."""

from __future__ import annotations

import re
import sys

import pyarrow.parquet as pq
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsellm.data.tokenizer import LONGEST_RUN, WHITE_SPACE, cut_long_runs, load_tokenizer
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


# Every kind of white space, what only Python or nobody takes for it, and what the pattern names.
PIECES = [*re.findall(WHITE_SPACE, "".join(map(chr, range(sys.maxunicode)))), "   ", "\n\n"]
PIECES += [*"\x1c\x1d\x1e\x1f\u180e\u200b\ufeff", *"a9-'", "'s", "'ll", "é", "e\u0301", "🦙"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=20), st.integers(1, 4))
def test_cutting_long_runs_changes_no_id(gpt2_cache, pieces, longest):
    text, reference = "".join(pieces), tiktoken.get_encoding("gpt2")
    parts = list(cut_long_runs(text, longest))
    joined = [token for part in parts for token in reference.encode_ordinary(part)]
    assert joined == reference.encode_ordinary(text)
    assert not any(re.search(rf"{WHITE_SPACE}{{{longest + 1}}}\S", part) for part in parts)


def test_gpt2_encodes_what_overflows_tiktokens_regex(gpt2_cache):
    space, before_x = tiktoken.get_encoding("gpt2").encode_ordinary("  x")
    run = " " * (2 * LONGEST_RUN + 1)
    (tokens,) = load_tokenizer("gpt2").encode_batch([run + "x" + run])
    assert tokens.tolist() == [space] * (len(run) - 1) + [before_x] + [space] * len(run)


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
