"""GPT-2 and byte tokenizers on real and hostile text."""

import hashlib
import json
import re
import sys
import time

import pyarrow.parquet as pq
import pytest
import regex
import tiktoken
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st

from sparsellm.data.tokenizer import LONGEST_RUN, WHITE_SPACE, cut_long_runs, load_tokenizer
from sparsellm.generate import _Streamer
from sparsellm.recipe.vocabulary import VOCAB_SIZE, vocab_size
from sparsellm.runs.huggingface.hf_tokenizer import write_tokenizer

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


LONG_WORDS = ["a", "é", "7", "=", "日", " ", "\n", "'s", "ab", "\u00a0"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(LONG_WORDS), st.integers(1, 9)), max_size=12))
def test_only_words_that_are_too_long_get_other_ids(gpt2_cache, runs):
    text, reference = "".join(piece * count for piece, count in runs), tiktoken.get_encoding("gpt2")
    parts = list(cut_long_runs(text, word=6))
    assert "".join(parts) == text
    words = regex.findall(r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+", text)
    if max(map(len, words), default=0) <= 6:
        joined = [token for part in parts for token in reference.encode_ordinary(part)]
        assert joined == reference.encode_ordinary(text)
    assert not any(regex.search(r"\p{L}{7}|\p{N}{7}|[^\s\p{L}\p{N}]{7}", part) for part in parts)


def test_a_word_of_megabytes_takes_seconds(gpt2_cache):
    began = time.perf_counter()
    (tokens,) = load_tokenizer("gpt2").encode_batch(["a" * 3_000_000])
    assert len(tokens) == 750_000
    assert time.perf_counter() - began < 30


def _train(  # noqa: PLR0917
    folder, pre_tokenizer, decoder, model, trainer, eos
):
    """A small tokenizer of Hugging Face's in a folder, with the traps that real ones have."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(["the cat sat on the mat, naïve 🦙 2,048 zeros"] * 20, trainer)
    tokenizer.add_special_tokens([eos])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, tokenizer.token_to_id(eos))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}}))
    return tokenizer


@pytest.fixture
def byte_level(tmp_path):
    """The folder of a byte-level BPE, as GPT-2's and Llama 3's."""
    _train(
        tmp_path / "bpe",
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
        tokenizers.models.BPE(),
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
        ),
        "<eod>",
    )
    return tmp_path / "bpe"


def test_a_tokenizer_of_hugging_faces_adds_and_reads_no_special_token(byte_level):
    tokenizer = load_tokenizer(f"hf:{byte_level}")
    assert tokenizer.eot_id == tokenizer.vocab_size - 1
    texts = ["the cat", "", "naïve 🦙\n", "<eod> is text", "long enough to be truncated to four"]
    encoded = tokenizer.encode_batch(texts)
    for text, tokens in zip(texts, encoded, strict=True):
        assert tokenizer.decode(tokens.tolist()) == text
        assert b"".join(tokenizer.decode_bytes([t]) for t in tokens.tolist()).decode() == text
        assert tokenizer.eot_id not in tokens
    assert tokenizer.decode([tokenizer.eot_id]) == "<eod>"
    assert len(tokenizer.encode_batch(["\ud800 x"])[0]) > 1


def test_a_sentence_piece_tokenizer_streams_spaces_and_bytes(tmp_path):
    _train(
        tmp_path / "unigram",
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.decoders.Metaspace(),
        tokenizers.models.Unigram(),
        tokenizers.trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "<0xF0>"]),
        "</s>",
    )
    tokenizer = load_tokenizer(f"hf:{tmp_path / 'unigram' / 'tokenizer.json'}")
    (tokens,) = tokenizer.encode_batch(["the cat sat"])
    assert tokenizer.decode_bytes(tokens.tolist()) == b" the cat sat"
    assert tokenizer.decode_bytes([tokenizer._tokenizer.token_to_id("<0xF0>")]) == b"\xf0"


@pytest.mark.parametrize(
    ("kind", "decoder", "suffix"),
    [("WordPiece", "WordPiece", None), ("BPE", "BPEDecoder", "</w>"), ("WordLevel", None, None)],
)
def test_words_whose_pieces_have_no_spaces_are_those_of_the_library(
    tmp_path, kind, decoder, suffix
):
    options = {} if suffix is None else {"end_of_word_suffix": suffix}
    trainer = getattr(tokenizers.trainers, f"{kind.replace('BPE', 'Bpe')}Trainer")
    _train(
        tmp_path / "words",
        tokenizers.pre_tokenizers.Whitespace(),
        decoder and getattr(tokenizers.decoders, decoder)(*options.values()),
        getattr(tokenizers.models, kind)(unk_token="<unk>", **options),
        trainer(vocab_size=60, special_tokens=["<unk>"], **options),
        "</s>",
    )
    tokenizer, pieces = load_tokenizer(f"hf:{tmp_path / 'words' / 'tokenizer.json'}"), []
    (tokens,) = tokenizer.encode_batch(["the cat sat"])
    assert tokenizer.decode_bytes(tokens.tolist()) == b"the cat sat"
    streamer = _Streamer(tokenizer, pieces.append, [tokenizer.eot_id])
    for token in (tokenizer.eot_id, *tokens.tolist()):
        streamer.put(torch.tensor([token]))
    assert "".join(pieces) == "the cat sat"


def _unigram(folder, eos, text):
    """Writes a tokenizer with a Unigram model; returns it as the library has it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", eos], unk_token="<unk>"
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return tokenizer


def test_a_special_token_spelt_out_is_text_to_a_unigram_model_too(tmp_path):
    tokenizer = _unigram(tmp_path, "</s>", "a cat < sat / on > the unk mats")
    ours = load_tokenizer(f"hf:{tmp_path}")
    text = "a </s> <unk> mat"
    (tokens,) = ours.encode_batch([text])
    assert ours.eot_id == tokenizer.token_to_id("</s>") == 1
    assert set(tokens.tolist()).isdisjoint([0, 1])
    assert ours.decode_bytes(tokens.tolist()).decode() == " " + text
    (plain,) = ours.encode_batch(["the cat sat on mats"])  # scores of other pieces stay
    assert plain.tolist() == tokenizer.encode("the cat sat on mats").ids
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    # The identity is not that of the file, which would find them: shards made so are refused.
    keys = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    digest = hashlib.sha256(json.dumps([content.get(key) for key in keys]).encode())
    assert ours.identity != f"hf {digest.hexdigest()[:16]}"


@pytest.mark.parametrize("special", ["</s>", "<x.y>", "^|$"])
def test_a_special_token_with_a_character_that_no_piece_has_is_text_too(tmp_path, special):
    folder = tmp_path / "own"
    tokenizer = _unigram(folder, special, "a cat sat / on > the mats x.y")
    ours = load_tokenizer(f"hf:{folder}")
    texts = [f"the cat{special}sat", special, f"{special}{special} on", "the cat sat on mats"]
    encoded = [tokens.tolist() for tokens in ours.encode_batch(texts)]
    assert all(ours.eot_id not in tokens for tokens in encoded)
    assert encoded[-1] == tokenizer.encode(texts[-1]).ids
    exported = tmp_path / "exported"
    exported.mkdir()
    write_tokenizer(f"hf:{folder}", exported, context_length=64)
    theirs = transformers.AutoTokenizer.from_pretrained(exported, split_special_tokens=True)
    assert theirs(texts, add_special_tokens=False).input_ids == encoded
    assert theirs.convert_tokens_to_ids(special) == ours.eot_id
    again = load_tokenizer(f"hf:{exported}")
    assert again.identity == ours.identity


_WORDS = ["a", "</s", ">", "</", "s>", "<", "/s>", "cat", "sat", "<unk>", "</s>", "##s>", "##/s>"]
_VOCABULARY = {word: number for number, word in enumerate(_WORDS)}
_CHARACTERS = {letter: number for number, letter in enumerate("</s> actunk")}
_MERGES = [("<", "/"), ("s", ">"), ("</", "s>")]


@pytest.mark.parametrize(
    "model",
    [
        tokenizers.models.WordLevel(_VOCABULARY, unk_token="<unk>"),
        tokenizers.models.WordPiece(_VOCABULARY, unk_token="<unk>"),
        tokenizers.models.BPE(
            _CHARACTERS | {"</s>": 11, "<unk>": 12}, [], unk_token="<unk>", ignore_merges=True
        ),
        tokenizers.models.BPE(_CHARACTERS | {"</": 11, "s>": 12, "</s>": 13}, _MERGES),
    ],
    ids=["WordLevel", "WordPiece", "BPE that ignores merges", "BPE whose merges give it"],
)
@pytest.mark.parametrize("special", [True, False])
def test_an_end_of_document_token_spelt_out_is_text_to_every_model(model, special, tmp_path):
    hf_tokenizer = tokenizers.Tokenizer(model)
    hf_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    hf_tokenizer.add_tokens([tokenizers.AddedToken("</s>", special=special, normalized=False)])
    (tmp_path / "own").mkdir()
    hf_tokenizer.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    ours = load_tokenizer(f"hf:{tmp_path / 'own'}")
    assert ours.eot_id == hf_tokenizer.token_to_id("</s>")
    texts = ["a </s> cat", "</s>", "a</s>cat", "cat </s></s>"]
    assert any(ours.eot_id in hf_tokenizer.encode(text).ids for text in texts)
    encoded = [tokens.tolist() for tokens in ours.encode_batch(texts)]
    assert all(tokens and ours.eot_id not in tokens for tokens in encoded)
    (plain,) = ours.encode_batch(["a cat sat"])
    assert plain.tolist() == hf_tokenizer.encode("a cat sat").ids
    # So it is in an export, whose end-of-document token has the same id.
    (tmp_path / "out").mkdir()
    write_tokenizer(ours.name, tmp_path / "out", context_length=64)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", split_special_tokens=True)
    assert stock(texts, add_special_tokens=False).input_ids == encoded
    assert stock.eos_token_id == ours.eot_id
    again = load_tokenizer(f"hf:{tmp_path / 'out'}")
    assert (again.eot_id, again.identity) == (ours.eot_id, ours.identity)


def test_an_end_of_document_token_added_as_an_ordinary_one_is_text_when_spelt_out(byte_level):
    hf_tokenizer = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    hf_tokenizer.add_tokens([tokenizers.AddedToken("<end>", special=False)])
    hf_tokenizer.save(str(byte_level / "tokenizer.json"))
    (byte_level / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    ours = load_tokenizer(f"hf:{byte_level}")
    assert ours.eot_id == hf_tokenizer.token_to_id("<end>")
    assert ours.eot_id in hf_tokenizer.encode("the <end> cat").ids
    (tokens,) = ours.encode_batch(["the <end> cat"])
    assert ours.eot_id not in tokens
    assert ours.decode(tokens.tolist()) == "the <end> cat"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<eod>"}}, "<eod>"),
        ({"special_tokens_map": {"eos_token": "</s>"}}, "</s>"),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 301}}, "</s>"),
        (
            {
                "tokenizer_config": {"eos_token": None},
                "generation_config": {"eos_token_id": [301, 300]},
            },
            "</s>",
        ),
        (
            {
                "tokenizer_config": {"eos_token": "<eod>"},
                "special_tokens_map": {"eos_token": {"content": "</s>"}},
            },
            "</s>",
        ),
        (
            {
                "tokenizer_config": {"eos_token": "<eod>", "added_tokens_decoder": {}},
                "special_tokens_map": {"eos_token": "</s>"},
            },
            "<eod>",
        ),
        ({"config": {"eos_token_id": 5}}, None),  # the piece with this id
        ({"tokenizer_config": {}, "config": {"eos_token_id": None}}, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_the_end_of_document_token_is_the_one_that_the_folder_names(byte_level, files, expected):
    hf_tokenizer = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    while (size := hf_tokenizer.get_vocab_size()) < 300:
        hf_tokenizer.add_tokens([f"<filler {size}>"])
    hf_tokenizer.add_special_tokens(["<|endoftext|>", "</s>"])
    hf_tokenizer.save(str(byte_level / "tokenizer.json"))
    (byte_level / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (byte_level / f"{name}.json").write_text(json.dumps(content))
    if expected == "":
        with pytest.raises(ValueError, match=r"names no end-of-document .*<\|endoftext\|>"):
            load_tokenizer(f"hf:{byte_level}")
        return
    eot = load_tokenizer(f"hf:{byte_level}").eot
    assert eot == (expected or hf_tokenizer.id_to_token(5))
    config = files.get("config", {}) | files.get("generation_config", {})
    if not config:  # transformers has the same
        stock = transformers.PreTrainedTokenizerFast.from_pretrained(byte_level)
        assert stock.eos_token == expected


def test_its_vocabulary_is_counted_by_the_largest_id(byte_level, tiny):
    content = json.loads((byte_level / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 511, "content": "<far>"})
    (byte_level / "tokenizer.json").write_text(json.dumps(content))
    name = f"hf:{byte_level}"
    assert load_tokenizer(name).vocab_size == vocab_size(name) == 512
    assert tiny(f"data.tokenizer={name}", "model.vocab_multiple=100").padded_vocab_size == 600


def test_a_tokenizer_with_random_ids_is_refused(byte_level):
    file, text = byte_level / "tokenizer.json", "the cat sat on the mat"
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.5
    file.write_text(json.dumps(content))
    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    assert len({tuple(library.encode(text).ids) for _ in range(50)}) > 1
    message = r'tokenizer\.json: model\.dropout is 0\.5.*"dropout": null'
    for use in (load_tokenizer, vocab_size):
        with pytest.raises(ValueError, match=message):
            use(f"hf:{byte_level}")


def test_missing_and_damaged_tokenizers_are_named(byte_level, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"hf:/nowhere: there is no folder /nowhere"):
        load_tokenizer("hf:/nowhere")
    (byte_level / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"names no end-of-document token.*: set eos_token"):
        load_tokenizer(f"hf:{byte_level}")
    (byte_level / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: key .*put the tokenizer's own file back"
    ):
        load_tokenizer(f"hf:{byte_level.parent}/./bpe")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (byte_level / "other.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"other\.json is not called tokenizer\.json; name"):
        load_tokenizer(f"hf:{byte_level}/other.json")
    with pytest.raises(ValueError, match=r"hf:no/such-model: no such folder, and not available"):
        load_tokenizer("hf:no/such-model")


def test_unknown_tokenizer_is_named():
    with pytest.raises(ValueError, match=r"tokenizer 'bpe' is unknown; valid are gpt2, bytes"):
        load_tokenizer("bpe")


def test_without_a_network_the_cause_is_short(tmp_path, monkeypatch, error_of):
    """tiktoken's error has the addresses and objects of four layers of libraries."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing answers there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    assert error_of("data", "inspect", "sample") == (
        "error: tiktoken could not get the GPT-2 vocabulary (Connection refused). Without a "
        "network, set TIKTOKEN_CACHE_DIR to a folder with tiktoken's two cached GPT-2 files, or "
        "take the tokenizer bytes, which needs none"
    )
