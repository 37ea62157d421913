"""Corpora: bundled ones, overrides, and what is refused."""

import gzip
import json
import re

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsellm.data.held_out import held_out_sequences
from sparsellm.data.lanes import ENOUGH_DOCUMENTS, choose_num_lanes
from sparsellm.data.text.blocks import documents_in_order, open_shard
from sparsellm.data.text.corpus import KINDS, load_corpora, load_corpus
from sparsellm.data.text.shards import Shard, document_hash
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.paths import bundled
from sparsellm.recipe.sections import DataConfig
from sparsellm.recipe.strict import load_yaml, validate


def _parquet(path, texts=("a", "b"), column="text"):
    pq.write_table(pa.table({column: list(texts)}), path)
    return path


def _read_all(path, fmt):
    block = open_shard(Shard(str(path), fmt)).read(0)
    return block.documents(np.arange(len(block)))


@pytest.mark.parametrize("path", sorted(bundled("data").glob("*.yaml")), ids=lambda p: p.stem)
def test_bundled_corpus_is_valid(path):
    content = load_yaml(path)
    corpus = validate(KINDS[content["source"]], content, str(path))
    assert corpus.description


def test_sample_is_real_text_dealt_out_deterministically():
    corpus = load_corpus("sample")
    assert len(corpus.train) == 16
    members = [m for shard in corpus.train for m in shard.members]
    held_out = corpus.validation[0].members
    assert len(members) > 300
    assert 0.005 < len(held_out) / len(members) < 0.05
    assert not set(members) & set(held_out)
    assert load_corpus("sample") == corpus
    assert "def " in open_shard(corpus.validation[0]).read(0).documents(np.arange(1))[0]


def test_globs_environment_and_held_out_shards(tmp_path, monkeypatch):
    for index in range(3):
        _parquet(tmp_path / f"train-{index}.parquet")
    monkeypatch.setenv("MY_TEXT", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("source: files\nfiles: ['${MY_TEXT}/train-*']\nvalidation_shards: 1\n")
    corpus = load_corpus(str(path))
    before = corpus.fingerprint
    assert [s.url.rsplit("/", 1)[-1] for s in corpus.train] == [
        "train-0.parquet",
        "train-1.parquet",
    ]
    assert corpus.validation[0].url.endswith("train-2.parquet")
    other = load_corpus(str(path), files=[f"{tmp_path}/train-[12]*"])
    assert other.fingerprint != before
    _parquet(tmp_path / "train-0.parquet", ["longer text than before"] * 50)
    assert load_corpus(str(path)).fingerprint != before


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            "source: files\nfile: [x]\n",
            ValueError,
            r"unknown key 'file'; nearest valid key: 'files'",
        ),
        ("files: [x]\n", ValueError, r"key 'source' is missing; valid are hub, files, stdlib"),
        (
            "source: ftp\n",
            ValueError,
            r"key 'source' is 'ftp'; valid are hub, files, stdlib, mixture",
        ),
        ("source: files\nfiles: ['/nowhere/*.parquet']\n", FileNotFoundError, r"match no file"),
        ("source: files\nfiles: ['${NO_SUCH_VARIABLE}/*']\n", ValueError, r"not set; set it, or"),
        ("source: hub\nrepo: a/b\n", ValueError, r"key 'revision' is missing"),
    ],
)
def test_mistakes_are_named(tmp_path, content, error, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(error, match=r"bad\.yaml(, line \d+)?: .*" + message):
        load_corpus(str(path))


def test_unknown_format_overlap_and_nothing_left(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"a\.pdf: unknown format; valid are .* to_parquet"):
        load_corpus("local", files=[f"{tmp_path}/*.pdf"], validation_files=[f"{tmp_path}/*.pdf"])
    same = [str(_parquet(tmp_path / "a.parquet"))]
    with pytest.raises(ValueError, match=r"is in files and in validation_files"):
        load_corpus("local", files=same, validation_files=same)
    with pytest.raises(FileNotFoundError, match=r"no bundled corpus of that name.*fineweb"):
        load_corpus("nope")


def test_a_path_that_is_not_there_is_named_beside_others_that_are(tmp_path):
    present_file = str(_parquet(tmp_path / "a.parquet"))
    corpus = load_corpus("local", files=[present_file, f"{tmp_path}/*.jsonl"])
    assert len(corpus.train) == 1
    with pytest.raises(FileNotFoundError, match=r"files: /.*/b\.parquet does not exist"):
        load_corpus("local", files=[present_file, f"{tmp_path}/b.parquet"])
    (tmp_path / "c.parquet").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match=r"c\.parquet is a link to gone, which does not ex"):
        load_corpus("local", files=[f"{tmp_path}/*.parquet"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"/empty has no Parquet, JSON Lines or .txt file; .*/empty/\*.md'"
    ):
        load_corpus("local", files=[present_file, f"{tmp_path}/empty"])


def test_a_path_that_exists_is_no_glob(tmp_path):
    folder = tmp_path / "papers [2024]"
    folder.mkdir()
    file = _parquet(folder / "a.parquet")
    for path in (folder, file):
        assert {shard.url for shard in load_corpus("local", files=[str(path)]).train} == {str(file)}


def test_of_a_folder_only_visible_data_is_read_and_the_rest_is_told(tmp_path, caplog):
    hidden_folder = tmp_path / ".cache"  # that is itself hidden is no matter
    read, hidden = ("b.txt", "sub/a.txt"), (".half.txt", "_temporary/0.txt")
    for name in (*read, *hidden, "README.md", "a.jsonl.part"):
        (hidden_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden_folder / name).write_text("text")
    memory = fsspec.filesystem("memory")
    memory.put(str(hidden_folder), "/.folder", recursive=True)
    for folder in (str(hidden_folder), "memory://.folder"):
        caplog.clear()
        for _ in range(2):
            corpus = load_corpus("local", files=[folder])
        names = [shard.url.removeprefix(folder) for shard in corpus.train]
        assert tuple(name.rpartition("folder")[2].lstrip("/") for name in names) == read
        [warning] = caplog.messages
        assert warning.startswith("not read in folder ")
        assert ": .half.txt, README.md, " in warning
        assert "and 1 more (a glob can name them)" in warning
    named = load_corpus("local", files=[f"{hidden_folder}/README.md"])
    assert named.train[0].url == f"{hidden_folder}/README.md"


def test_a_path_and_its_address_are_one_file(tmp_path):
    path = _parquet(tmp_path / "a.parquet")
    corpus = load_corpus("local", files=[str(path), f"file://{path}"])
    assert [shard.url for shard in corpus.train] == [str(path)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("utf-8-sig"))
    [shard] = load_corpus("local", files=[f"{tmp_path}/a.txt"], validation_fraction=0).train
    assert open_shard(shard).read(0).documents(np.arange(1)) == ["café"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz", "txt"])
def test_another_encoding_is_named_with_how_to_convert_it(tmp_path, encoding, end):
    """``json.loads`` would take the first line of UTF-16, and ``decode`` a .txt without a mark."""
    text = '{"text": "a caf\u00e9 of some length, and further words"}\n' * 3
    path = tmp_path / f"a.{end}"
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if end.endswith("gz") else data)
    shard = load_corpus("local", files=[str(path)]).train[0]
    place = "" if end == "txt" else ": line 1"
    reason = "byte 0xe9.*iconv -f LATIN1" if encoding == "latin-1" else "iconv -f UTF-16"
    with pytest.raises(ValueError, match=rf"a\.{end}{place} is not UTF-8 text \(.*{reason}"):
        open_shard(shard).read(0).documents(np.arange(1))


def test_files_for_a_corpus_that_has_none_name_the_remedy(tmp_path):
    files = [str(_parquet(tmp_path / "a.parquet"))]
    with pytest.raises(ValueError, match=r"data\.files does not apply to.*sample.*local"):
        load_corpus("sample", files=files)


def test_a_share_to_hold_out_is_refused_where_no_files_are_given(tmp_path):
    _parquet(tmp_path / "a.parquet", [f"document {i} of some length" for i in range(40)])
    path = tmp_path / "own.yaml"
    path.write_text("source: files\nfiles: '${CORPUS_DIR}/a.parquet'\nvalidation_fraction: 0.2\n")
    for corpus in ("sample", str(path), {str(path): 1.0}):
        load_corpora(DataConfig(corpus=corpus, validation_fraction=0.01))  # the default
        with pytest.raises(ValueError, match=r"data\.validation_fraction 0\.1 has no effect with"):
            load_corpora(DataConfig(corpus=corpus, validation_fraction=0.1))
    # Files' own share is that of the recipe.
    files = [str(tmp_path / "a.parquet")]
    data = DataConfig(corpus=str(path), files=files, validation_fraction=0.3)
    [held_out] = load_corpora(data)[0].validation
    assert held_out.part == (0.0, 0.3)


@pytest.mark.parametrize("held_out", ["validation_fraction: 0.2", "validation_shards: 1"])
@pytest.mark.parametrize("replaces_files", [False, True])
def test_validation_files_replace_what_a_corpus_holds_out(tmp_path, held_out, replaces_files):
    for name in ("a", "b", "held"):
        _parquet(tmp_path / f"{name}.parquet", [f"{name} {i}" for i in range(40)])
    path, train = tmp_path / "own.yaml", [str(tmp_path / f"{name}.parquet") for name in "ab"]
    path.write_text(f"source: files\nfiles: {train}\n{held_out}\n")
    settings = {"validation_files": [str(tmp_path / "held.parquet")]}
    settings |= {"files": train} if replaces_files else {}
    [corpus] = load_corpora(DataConfig(corpus=str(path), **settings))
    assert [shard.url for shard in corpus.validation] == settings["validation_files"]
    assert [shard.url for shard in corpus.train] == train
    assert not any(shard.is_part for shard in (*corpus.train, *corpus.validation))


def test_a_corpus_that_holds_out_in_two_ways_is_refused(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("source: files\nfiles: a\nvalidation_shards: 1\nvalidation_fraction: 0.1\n")
    with pytest.raises(ValueError, match="validation_shards and validation_fraction each say what"):
        load_corpus(str(path))


def test_a_column_for_files_without_columns_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    data = DataConfig(corpus="local", files=[str(tmp_path / "a.txt")], text_field="body")
    with pytest.raises(ValueError, match=r"data\.text_field is for Parquet and JSON Lines"):
        load_corpora(data)


def test_a_mixture_reads_the_standard_library_once(tmp_path):
    for name, groups in (("one", 4), ("two", 8)):
        text = f"source: stdlib\nnum_shards: {groups}\nvalidation_percent: {groups}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    mixture = {str(tmp_path / f"{name}.yaml"): 1.0 for name in ("one", "two")}
    with pytest.raises(ValueError, match="the corpora one, two of the mixture all read Python's"):
        load_corpora(DataConfig(corpus=mixture))


def test_true_is_no_share_in_a_mixture_of_its_own_file(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text("source: mixture\ncorpora:\n  sample: true\n")
    with pytest.raises(ValueError, match=r"mix\.yaml.*: key 'corpora': must be a number, not true"):
        load_corpora(DataConfig(corpus=str(path)))


def test_two_corpora_of_one_name_name_the_remedy(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        file = _parquet(tmp_path / folder / "train.parquet")
        (tmp_path / folder / "web.yaml").write_text(f"source: files\nfiles: [{file}]\n")
    mixture = {str(tmp_path / folder / "web.yaml"): 1.0 for folder in ("a", "b")}
    with pytest.raises(ValueError, match="called 'web': copy the YAML file of one to another name"):
        load_corpora(DataConfig(corpus=mixture))


def test_what_one_corpus_of_a_mixture_holds_out_no_other_trains_on(tmp_path):
    for name in ("a", "b"):
        _parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "b.parquet")
    (tmp_path / "one.yaml").write_text(
        "source: files\nfiles: '${CORPUS_DIR}/a.parquet'\n"
        "validation_files: '${CORPUS_DIR}/b.parquet'\n"
    )
    (tmp_path / "two.yaml").write_text("source: files\nfiles: '${CORPUS_DIR}/link.parquet'\n")
    mixture = {str(tmp_path / f"{name}.yaml"): 1.0 for name in ("one", "two")}
    with pytest.raises(ValueError, match=r"b\.parquet is held out by corpus one and .* corpus two"):
        load_corpora(DataConfig(corpus=mixture))
    with (tmp_path / "two.yaml").open("a") as file:
        file.write("text_field: title\n")
    assert len(load_corpora(DataConfig(corpus=mixture))) == 2


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
@pytest.mark.parametrize(("first", "second"), [(0.3, 0), (0, 0.3), (0.1, 0.3), (0.3, 0.3)])
def test_of_a_share_that_is_held_out_no_corpus_trains_on_a_part(tmp_path, names, first, second):
    _parquet(tmp_path / "a.parquet", [f"document {i} of some length" for i in range(100)])
    for name, fraction in (("one", first), ("two", second)):
        (tmp_path / f"{name}.yaml").write_text(
            f"source: files\nfiles: '${{CORPUS_DIR}}/a.parquet'\nvalidation_fraction: {fraction}\n"
        )
    data = DataConfig(corpus={str(tmp_path / f"{name}.yaml"): 1.0 for name in names})
    if first == second:
        assert len(load_corpora(data)) == 2
        return
    with pytest.raises(ValueError, match=r"a\.parquet is held out by corpus .* corpus (one|two);"):
        load_corpora(data)


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.1, 0.2)])
def test_a_document_divided_alike_by_two_corpora_is_on_neither_side_twice(tmp_path, shares):
    (tmp_path / "book.txt").write_text("A long book. " * 1000)
    for name, share in zip("ab", shares, strict=True):
        (tmp_path / f"{name}.yaml").write_text(
            f"source: files\nfiles: '${{CORPUS_DIR}}/book.txt'\nvalidation_fraction: {share}\n"
        )
    data = DataConfig(corpus={str(tmp_path / f"{name}.yaml"): 1.0 for name in "ab"})
    if shares[0] == shares[1]:
        assert len(load_corpora(data)) == 2
        return
    with pytest.raises(ValueError, match=r"book\.txt is held out by corpus [ab] and in the "):
        load_corpora(data)


def test_a_copy_of_held_out_text_among_what_is_trained_on_is_told(tmp_path, caplog):
    texts = [f"document {i} of some length" for i in range(100)]
    train, held_out, copy = (tmp_path / f"{name}.parquet" for name in ("train", "held", "copy"))
    _parquet(train, texts[:50])
    _parquet(held_out, texts[50:])
    data = DataConfig(
        corpus="local", files=[str(train), str(copy)[:-7] + "*"], validation_files=[str(held_out)]
    )
    load_corpora(data)
    assert not caplog.messages
    copy.write_bytes(held_out.read_bytes())
    for _ in range(2):
        load_corpora(data)
    [message] = caplog.messages
    assert re.search(
        r"copy\.parquet, which corpus local trains on, is a copy of .*held\.p", message
    )


def test_links_as_in_the_hubs_cache_keep_their_names(tmp_path):
    """``snapshots/<revision>/x.parquet`` leads to ``blobs/<sha>``, a name without a suffix."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("0", "f00d"), ("1", "beef"), ("same-as-1", "beef")):
        _parquet(blobs / blob, [f"document of {blob}"])
        (snapshot / f"{name}.parquet").symlink_to(f"../../blobs/{blob}")
    (tmp_path / "link").symlink_to(snapshot)
    files = [f"{tmp_path}/link/*.parquet", f"{snapshot}/0.parquet"]
    corpus = load_corpus("local", files=files)
    assert [shard.url for shard in corpus.train] == [f"{snapshot}/{i}.parquet" for i in (0, 1)]
    assert _read_all(corpus.train[0].url, corpus.train[0].format) == ["document of f00d"]
    with pytest.raises(ValueError, match=r"same-as-1\.parquet is in files and in validation_files"):
        load_corpus("local", files=files, validation_files=[f"{snapshot}/same*"])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"no parquet at all"), r" is damaged, or not in the format"),
        (
            lambda p: p.write_bytes(_parquet(p).read_bytes()[:-20]),
            r" is damaged, or not in the format",
        ),
        (
            lambda p: _parquet(p, column="body"),
            r"no column 'text'; it has body\. Name .*; in files for --data, rename it to 'text'",
        ),
        (
            lambda p: pq.write_table(pa.table({"text": [1, 2]}), p),
            r"column 'text' holds int64, not text; it has no text \(text\); take it out",
        ),
        (
            lambda p: pq.write_table(pa.table({"text": [1], "n": [1], "body": ["b"]}), p),
            r"column 'text' holds int64, not text; it has body\. Name its text",
        ),
        (
            lambda p: pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), p),
            r"2 columns 'text'",
        ),
        (lambda p: _parquet(p, column="x" * 99), r"it has x{40}…\. Name"),
    ],
)
def test_bad_parquet_is_named(tmp_path, write, message):
    path = tmp_path / "bad.parquet"
    write(path)
    with pytest.raises(ValueError, match=r"bad\.parquet.*" + message):
        open_shard(Shard(str(path), "parquet"))


def test_corrupt_page_is_named(tmp_path):
    path = _parquet(tmp_path / "bad.parquet", [f"document {i} " * 50 for i in range(500)])
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = b"\xff" * (len(content) // 2 - 100)
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"bad\.parquet: row group 0 is damaged"):
        _read_all(path, "parquet")


def test_row_that_is_not_utf8_is_named(tmp_path):
    texts = pa.array([b"fine", b"caf\xe9"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "latin.parquet")
    with pytest.raises(ValueError, match=r"latin\.parquet: row group 0, row 1.*repair or remove"):
        _read_all(tmp_path / "latin.parquet", "parquet")


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column_is_read(tmp_path, kind):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["a", None, "naïve"], kind)}), path)
    assert _read_all(path, "parquet") == ["a", "", "naïve"]


def test_row_group_above_2_gib_is_read(tmp_path, monkeypatch):
    reader = open_shard(Shard(str(_parquet(tmp_path / "a.parquet")), "parquet"))
    chunk = pa.array(["x" * 2**20])
    table = pa.table({"text": pa.chunked_array([chunk] * 2100)})  # one and the same MiB
    monkeypatch.setattr(reader._file, "read_row_group", lambda *_, **__: table)
    monkeypatch.setattr(reader, "_sizes", [2100])
    assert reader.read(0).documents(np.array([2099])) == ["x" * 2**20]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"line 3 is not JSON"),
        ('{"body": "x"}', r"line 3 has no key 'text'"),
        ('{"text": 5}', r"line 3: 'text' is of type int, not text; it has no text .*remove the l"),
        (
            '{"text": 5, "n": 1, "body": "x"}',
            r"line 3: 'text' is of type int, not text; it has body\. Name its text",
        ),
        ('["text"]', r"line 3 is of type list, not an object; each line must.*jq -c"),
        ("[", r"line 3 is not JSON.*jq -c"),
        ("{", r"line 3 is not JSON.*give only the files that have, .*jq -c \. FILE"),
        ('"text"', r"line 3 is of type str, not an object; each line must be"),
    ],
)
def test_bad_jsonl_line_is_numbered(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl: " + message):
        _read_all(path, "jsonl")


def test_null_and_blank_lines_are_empty_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n\n{"text": "x"}\n')
    assert _read_all(path, "jsonl") == ["", "", "x"]
    pq.write_table(pa.table({"text": [None, "x"]}), tmp_path / "a.parquet")
    assert _read_all(tmp_path / "a.parquet", "parquet") == ["", "x"]


def test_a_folder_alone_holds_out_whole_documents_by_their_text(tmp_path):
    texts = [f"document {i} of some length" for i in range(400)]
    _parquet(tmp_path / "a.parquet", texts[:200])
    _parquet(tmp_path / "b.parquet", texts[200:] + texts[:5])  # five stand in both files

    def parts(fraction):
        config = DataConfig(corpus=str(tmp_path), validation_fraction=fraction)
        assert config == DataConfig(
            corpus="local", files=[str(tmp_path)], validation_fraction=fraction
        )
        (corpus,) = load_corpora(config)
        return corpus, *(
            [d for ds in documents_in_order(side) for d in ds if d]
            for side in (corpus.train, corpus.validation)
        )

    corpus, train, held_out = parts(0.1)
    assert sorted(train + held_out) == sorted(texts + texts[:5])
    assert not set(train) & set(held_out)
    assert 0.05 < len(held_out) / len(texts) < 0.15
    assert set(held_out) < set(parts(0.2)[2])  # a larger share adds documents
    assert parts(0.2)[0].fingerprint != corpus.fingerprint
    assert parts(0)[2] == []
    with pytest.raises(ValueError, match=r"are empty or held out \(data\.validation_fraction\)"):
        choose_num_lanes((parts(1 - 1e-9)[0],))


def test_a_small_corpus_that_makes_a_mixture_few_streams_is_named(tmp_path, caplog):
    for name, number in (("large", ENOUGH_DOCUMENTS), ("small", 63)):
        lines = [json.dumps({"text": f"{name} {i}"}) for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        files = f"source: files\nfiles: ['{tmp_path / name}.jsonl']\n"
        (tmp_path / f"{name}.yaml").write_text(files)
    names = {name: str(tmp_path / f"{name}.yaml") for name in ("large", "small")}
    assert choose_num_lanes(load_corpora(DataConfig(corpus=names["small"]))) == 1
    assert not caplog.messages
    mixture = load_corpora(DataConfig(corpus={path: 1.0 for path in names.values()}))
    assert choose_num_lanes(mixture) == 1
    (message,) = caplog.messages
    assert "small has only 63 documents, so all corpora are read as 1 stream in place of" in message


def test_without_held_out_text_the_key_that_applies_is_named(tmp_path):
    files = [str(_parquet(tmp_path / "a.parquet"))]
    (corpus,) = load_corpora(DataConfig(corpus="local", files=files, validation_fraction=0))
    with pytest.raises(
        ValueError, match=r"no held-out text: .* \(data\.validation_fraction with d"
    ):
        next(held_out_sequences(corpus, load_tokenizer("bytes"), 8))


def _divided(path, fraction=0.01):
    """The documents for training and the held-out ones."""
    (corpus,) = load_corpora(DataConfig(corpus=str(path), validation_fraction=fraction))
    sides = (corpus.train, corpus.validation)
    return [[d for ds in documents_in_order(side) for d in ds if len(d)] for side in sides]


def test_of_a_few_documents_one_is_held_out_and_one_is_left(tmp_path):
    texts = [f"text {i} of some length" for i in range(30)]
    assert min(map(document_hash, texts)) > 0.01
    path = _parquet(tmp_path / "a.parquet", texts)
    train, held_out = _divided(path)
    assert (len(train), len(held_out)) == (29, 1)
    assert sorted(train + held_out) == sorted(texts)
    assert set(held_out) < set(_divided(path, 0.3)[1])
    for count in (2, 3):  # where a share would often take all of them, or none
        for first in range(10):
            _parquet(path, texts[first : first + count])
            for fraction in (0.01, 0.5, 0.9):
                sides = _divided(path, fraction)
                assert all(sides), (first, fraction)
                assert sum(len(t) for side in sides for t in side) == sum(
                    len(text) for text in texts[first : first + count]
                )


@pytest.mark.parametrize("fraction", [0.01, 0.25])
def test_of_a_single_long_document_the_end_is_held_out(tmp_path, fraction):
    text = "".join(f"Line {i} of a long book.\n" for i in range(4000))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "copy.txt").write_text(text)
    [head, same], [end, _] = _divided(tmp_path, fraction)
    assert head == same
    assert head + end == text
    assert head[-1].isspace()
    assert len(end) / len(text) == pytest.approx(fraction, abs=1e-3)


def test_a_text_that_is_long_beside_the_others_is_divided(tmp_path):
    """Its hash is the lowest, and all of it would be nearly all of the text."""
    texts = ["short", "this one is long " * 500]
    texts.sort(key=document_hash)
    _parquet(tmp_path / "a.parquet", texts)
    train, held_out = _divided(tmp_path)
    total = sum(map(len, texts))
    assert sum(map(len, train + held_out)) == total
    assert 0.005 * total < sum(map(len, held_out)) < 0.02 * total


def test_text_of_ones_own_is_read_in_place_of_another_kind_of_corpus(tmp_path):
    for bundled_corpus in ("sample", "fineweb-edu"):
        config = DataConfig(corpus=bundled_corpus, files=[str(tmp_path)])
        assert (config.corpus, config.files) == ("local", [str(tmp_path)])
    assert DataConfig(corpus="/no/such/folder").corpus == "/no/such/folder"
    with pytest.raises(FileNotFoundError, match=r"did you mean 'fineweb'.*data\.files=\[FOLDER\]"):
        load_corpora(DataConfig(corpus="finweb"))
