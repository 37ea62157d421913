"""The exported tokenizers give the ids that training saw."""

import itertools

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.runs.huggingface.hf_tokenizer import check_tokenizer, write_tokenizer

# Runs of every kind of white space, contractions, digits and signs: where GPT-2's split decides.
SPLITTING = st.text(
    st.sampled_from(
        " \t\n\r\v\f\x1c\x1d\x85\xa0\u1680\u180e\u2003\u2028\u200b\u3000\ufeff'sStTreRve"
        "mMll9٣²Ⅷaéß日ก\u0301_-.,!🙂"
    ),
    max_size=60,
)


class Pair:
    """Training's tokenizer and the exported one, as a user loads it."""

    def __init__(self, name, folder):
        write_tokenizer(name, folder, context_length=1024)
        self.name = name
        self.ours = load_tokenizer(name)
        self.theirs = AutoTokenizer.from_pretrained(folder)

    def check(self, *texts):
        for text, expected in zip(texts, self.ours.encode_batch(list(texts)), strict=True):
            ids = self.theirs(text, split_special_tokens=True)["input_ids"]
            assert ids == expected.tolist(), repr(text)


@pytest.fixture(scope="module")
def gpt2(test_data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
        yield Pair("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def raw_bytes(tmp_path_factory):
    return Pair("bytes", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(params=["gpt2", "raw_bytes"])
def pair(request):
    return request.getfixturevalue(request.param)


def test_real_text(pair, test_data):
    rows = pq.read_table(test_data / "corpus" / "validation.parquet", columns=["text"])
    pair.check(*rows.slice(0, 60)["text"].to_pylist())


def test_code_points_of_all_planes(pair):
    """Each in the company that decides splits; of GPT-2 every one outside the uniform blocks."""
    uniform = [
        *range(0x3400, 0x9FF0, 31),  # Han
        *range(0xAC00, 0xD7A4, 31),  # Hangul's syllables
        *range(0xE000, 0xF900, 31),  # private
        *range(0x17000, 0x187F8, 31),  # Tangut
        *range(0x20000, 0x33480, 31),  # Han
        *range(0x33480, 0xE0000, 127),  # unassigned
        *range(0xE0200, 0x110000, 127),  # unassigned, private
    ]
    varied = [*range(0x3400), *range(0x9FF0, 0xAC00), *range(0xD7A4, 0xD800)]
    varied += [*range(0xF900, 0x17000), *range(0x187F8, 0x20000), *range(0xE0000, 0xE0200)]
    points = (varied + uniform)[:: 1 if pair.name == "gpt2" else 16]  # bytes are never split
    texts = (f"a{c}1 {c}{c}  {c} b\n{c}!" for c in map(chr, points))
    while chunk := "".join(itertools.islice(texts, 4096)):
        pair.check(chunk)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=80), SPLITTING))
def test_any_text_gpt2(gpt2, text):
    gpt2.check(text)
    ids = gpt2.theirs(text, split_special_tokens=True)["input_ids"]
    assert gpt2.theirs.decode(ids) == gpt2.ours.decode(ids) == text


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_bytes(raw_bytes, text):
    raw_bytes.check(text)
    ids = raw_bytes.theirs(text, split_special_tokens=True)["input_ids"]
    assert raw_bytes.theirs.decode(ids) == raw_bytes.ours.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " " * 5000,
        "\n" * 300 + " " * 300 + "x",
        "\t \r\n \u00a0\u2003 \u3000\u200b\ufeff end  ",
        "a" * 3000,
        "aaaabaaab" * 200,
        "don't DON'T won'T they'll I'd 'll'll ''s",
        "<|endoftext|",
        "\x00\x01\x7f\x80",
        "👩‍👩‍👧‍👦🇩🇪e\u0301\u0323",
    ],
)
def test_adversarial_text(pair, text):
    pair.check(text)


def test_every_token_decodes_alike(pair):
    for token in range(pair.ours.vocab_size):
        assert pair.theirs.decode([token]) == pair.ours.decode([token]), token


def test_a_literal_end_of_text(pair):
    """Ordinary text to training; Hugging Face makes it the special token unless told otherwise."""
    text = "one<|endoftext|>two"
    (expected,) = pair.ours.encode_batch([text])
    assert pair.ours.eot_id not in expected
    pair.check(text)
    one, two = pair.ours.encode_batch(["one", "two"])
    ids = pair.theirs(text)["input_ids"]
    assert ids == [*one.tolist(), pair.ours.eot_id, *two.tolist()]
    assert pair.theirs.decode(ids) == text
    assert pair.theirs.decode(ids, skip_special_tokens=True) == "onetwo"


def test_special_tokens_and_inputs(pair):
    tokenizer = pair.theirs
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == pair.ours.eot_id
    assert len(tokenizer) == pair.ours.vocab_size
    assert tokenizer.model_max_length == 1024
    encoded = tokenizer("text")
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert pair.ours.eot_id not in encoded["input_ids"]  # nothing is added


def test_another_tokenizer_is_refused(gpt2, raw_bytes, tmp_path):
    write_tokenizer("bytes", tmp_path, context_length=64)
    check_tokenizer(tmp_path, raw_bytes.ours)
    with pytest.raises(ValueError, match=r"tokenizer\.json \(257 ids.*is not .* 'gpt2'.* give a"):
        check_tokenizer(tmp_path, gpt2.ours)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged.*own file back"):
        check_tokenizer(tmp_path, raw_bytes.ours)
