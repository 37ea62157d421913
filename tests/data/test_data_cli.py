"""`sparsellm data`: tokenised shards give the same stream, to the id; reports count right."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.loaders import token_loader
from sparsellm.cli import main
from sparsellm.data import tokenize_corpus as tokenize_module
from sparsellm.data.held_out import read_in_order, validation_batches
from sparsellm.data.position import DataStateMismatch, merge
from sparsellm.data.stream import choose_num_groups
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.text.identity import fingerprint
from sparsellm.data.text.token_shards import read_index
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.recipe.sections import DataConfig
from sparsellm.runs.huggingface.hf_tokenizer import build_tokenizer


def _texts(shard):
    return [f"document {row} of {shard} " * (row % 9) for row in range(60)]


@pytest.fixture
def texts(tmp_path):
    """The globs of a corpus of three formats and of its held-out file."""
    folder = tmp_path / "texts"
    folder.mkdir()
    pq.write_table(pa.table({"text": _texts(0)}), folder / "a.parquet", row_group_size=7)
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in _texts(shard)) for shard in (1, 2)]
    (folder / "b.jsonl").write_text(lines[0])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    pq.write_table(pa.table({"text": _texts(0)[:30]}), tmp_path / "held.parquet")
    return [str(folder)], [str(tmp_path / "held.parquet")]


def _stream(corpora, state=None, count=40, tokenizer="bytes"):
    loader = token_loader(corpora, tokenizer, context_length=48, micro_batch_size=2, seed=4)
    if state:
        loader.load_state_dict(state)
    return list(islice(loader, count)), merge([loader.state_dict()])


def _notes(corpora, state):
    loader = token_loader(corpora, context_length=48, micro_batch_size=2, seed=4)
    return loader.load_state_dict(state)


def _held_out(corpus):
    batches = validation_batches(
        corpus,
        load_tokenizer("bytes"),
        context_length=48,
        micro_batch_size=4,
        num_tokens=2000,
        rank=0,
        world_size=1,
    )
    return torch.cat(list(batches))


def _tokenize(texts, out, *further):
    files, held_out = texts
    command = ["data", "tokenize", "local", str(out), "--tokenizer", "bytes", "--workers", "1"]
    return main([*command, "--files", *files, "--validation-files", *held_out, *further])


def test_tokens_give_the_stream_of_their_text_and_go_on_where_it_was(texts, tmp_path):
    assert _tokenize(texts, tmp_path / "tokens") == 0
    files, held_out = texts
    text = load_corpora(DataConfig(corpus="local", files=files, validation_files=held_out))
    (tmp_path / "tokens").rename(tmp_path / "moved")
    tokens = load_corpora(DataConfig(corpus=str(tmp_path / "moved" / "local.yaml")))
    assert [shard.format for shard in tokens[0].train] == ["tokens"] * 3
    assert tokens[0].fingerprint == text[0].fingerprint
    expected, state = _stream(text)
    token_stream, same = _stream(tokens)
    assert all(torch.equal(a, b) for a, b in zip(expected, token_stream, strict=True))
    # Tokens are checked against what they were made of, and need no witness of their own.
    assert same.pop("witnesses") == {"local": None}
    assert same == {key: value for key, value in state.items() if key != "witnesses"}
    after, _ = _stream(text, state)
    assert all(torch.equal(a, b) for a, b in zip(after, _stream(tokens, state)[0], strict=True))
    assert torch.equal(_held_out(text[0]), _held_out(tokens[0]))


def test_tokens_are_shared_out_by_the_sizes_of_their_text(tmp_path, cli_here):
    for file in range(8):  # which decide what each stream reads
        rows = [{"text": "some words", "meta": "x" * (9000 if file == 3 else 9)}] * 50
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{file}.jsonl").write_text(text)
    files, out = [str(tmp_path / "*.jsonl")], tmp_path / "tokens"
    command = ["data", "tokenize", "local", str(out), "--tokenizer", "bytes", "--workers", "1"]
    cli_here(*command, "--files", *files)
    data = DataConfig(corpus="local", files=files, validation_fraction=0)
    [text], [tokens] = load_corpora(data), load_corpora(DataConfig(corpus=str(out / "local.yaml")))
    assert choose_num_groups(text.train, 48) == choose_num_groups(tokens.train, 48) == 1


def test_a_run_of_text_goes_on_with_its_tokens_and_its_held_out_text(texts, tmp_path, cli_here):
    (files, _), out = texts, tmp_path / "tokens"
    command = ["data", "tokenize", "local", str(out), "--tokenizer", "bytes", "--workers", "1"]
    cli_here(*command, "--files", *files)
    text = load_corpora(DataConfig(corpus="local", files=files))
    tokens = load_corpora(DataConfig(corpus=str(out / "local.yaml")))
    for before, after in ((text, tokens), (tokens, text)):
        state = _stream(before)[1]
        assert _notes(after, state) == []
        # Where nothing was held out there were no losses to compare.
        state["held_out"] = {"local": fingerprint(())}
        assert _notes(after, state) == []
    other = load_corpora(DataConfig(corpus="local", files=files, validation_files=texts[1]))
    state = _stream(other)[1] | {"corpora": {"local": text[0].fingerprint}}
    (note,) = _notes(text, state)
    assert note.startswith("the held-out text of corpus local has changed")


def test_of_a_folder_of_tokens_the_tokens_alone_are_text(texts, tmp_path, caplog):
    assert _tokenize(texts, tmp_path / "tokens") == 0
    folder = str(tmp_path / "tokens" / "train")
    [corpus] = load_corpora(DataConfig(corpus="local", files=[folder], validation_fraction=0))
    assert [Path(shard.url).name for shard in corpus.train] == [
        "00000.bin",
        "00001.bin",
        "00002.bin",
    ]
    assert not caplog.messages


def test_other_documents_of_tokens_held_out_are_another_stream(texts, tmp_path):
    assert _tokenize(texts, tmp_path / "tokens") == 0
    tokens_config = {"corpus": "local", "files": [str(tmp_path / "tokens" / "train")]}
    some, more, none = (
        load_corpora(DataConfig(**tokens_config, validation_fraction=share))
        for share in (0.1, 0.3, 0)
    )
    _, state = _stream(some, count=4)
    _stream(some, state, count=4)
    for other in (more, none):
        with pytest.raises(DataStateMismatch, match=r"files of corpus local are not those"):
            _stream(other, state)


def test_a_single_document_is_divided_as_text_and_as_tokens(tmp_path, cli_here):
    (tmp_path / "book.txt").write_text("".join(f"Line {i} of a book.\n" for i in range(2000)))
    command = ["data", "tokenize", "local", str(tmp_path / "tokens"), "--tokenizer", "bytes"]
    command += ["--workers", "1", "--files", str(tmp_path / "book.txt")]
    cli_here(*command)
    text = load_corpora(DataConfig(corpus=str(tmp_path / "book.txt")))
    tokens = load_corpora(DataConfig(corpus=str(tmp_path / "tokens" / "local.yaml")))
    for some, same in zip(_stream(text)[0], _stream(tokens)[0], strict=True):
        assert torch.equal(some, same)
    assert torch.equal(_held_out(text[0]), _held_out(tokens[0]))
    # Of ids that are one document, the parts have an end each.
    (tmp_path / "whole").mkdir()
    [whole] = load_corpora(DataConfig(corpus=str(tmp_path / "book.txt"), validation_fraction=0))
    path = tmp_path / "whole" / "0.bin"
    tokenize_module.tokenize_shard("bytes", whole.train[0], path)
    [parts] = load_corpora(DataConfig(corpus=str(path), validation_fraction=0.1))
    ids, tokenizer = np.fromfile(path, np.uint16), load_tokenizer("bytes")
    [head], [end] = (read_in_order(side, tokenizer) for side in (parts.train, parts.validation))
    cut = len(head) - 1
    assert head.tolist() == [*ids[:cut], 256]
    assert end.tolist() == ids[cut:].tolist()
    assert len(end) == pytest.approx(0.1 * len(ids), abs=1)


def test_documents_with_a_separator_between_them_are_tokenised_apart(tmp_path, cli_here):
    stories = [f"Story {i} of a dog. " * (1 + i % 5) for i in range(300)]
    (tmp_path / "a.txt").write_text("\n@@\n".join(stories))
    command = ["data", "tokenize", "local", str(tmp_path / "tokens"), "--workers=1"]
    command += ["--files", str(tmp_path / "a.txt"), "--document-separator=@@"]
    cli_here(*command, "--tokenizer", "bytes")
    ids = np.fromfile(tmp_path / "tokens" / "train" / "00000.bin", np.uint16)
    held_out = np.fromfile(tmp_path / "tokens" / "validation" / "00000.bin", np.uint16)
    assert (ids == 256).sum() + (held_out == 256).sum() == len(stories)
    text = load_corpora(
        DataConfig(corpus=str(tmp_path / "a.txt"), document_separator="@@", tokenizer="bytes")
    )
    tokens = load_corpora(DataConfig(corpus=str(tmp_path / "tokens" / "local.yaml")))
    for some, same in zip(_stream(text)[0], _stream(tokens)[0], strict=True):
        assert torch.equal(some, same)


def test_shards_have_megatrons_layout(texts, tmp_path):
    assert _tokenize(texts, tmp_path) == 0
    path = tmp_path / "train" / "00000.bin"
    begins, lengths, kind = read_index(path.with_suffix(".idx"))
    assert kind is np.uint16
    ids = np.fromfile(path, kind)
    documents = [
        bytes(ids[b : b + n - 1].astype(np.uint8))
        for b, n in zip(begins, lengths, strict=True)
        if n
    ]
    assert documents == [text.encode() for text in _texts(0) if text]
    index = path.with_suffix(".idx").read_bytes()
    # Magic, version, type code 8 (uint16), 60 sequences, 61 marks of documents.
    assert index[:34] == (
        b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + (60).to_bytes(8, "little")
        + (61).to_bytes(8, "little")
    )  # fmt: skip
    assert len(index) == 34 + 60 * 4 + 60 * 8 + 61 * 8


def test_whole_shards_are_kept_and_changed_ones_made_anew(texts, tmp_path, monkeypatch):
    assert _tokenize(texts, tmp_path) == 0
    tokenised = []
    real = tokenize_module.tokenize_shard
    monkeypatch.setattr(
        tokenize_module,
        "tokenize_shard",
        lambda tokenizer, shard, path: tokenised.append(path.name) or real(tokenizer, shard, path),
    )
    assert _tokenize(texts, tmp_path) == 0
    assert tokenised == []
    (tmp_path / "train" / "00002.json").unlink()  # as if it had been killed
    changed = tmp_path / "texts" / "b.jsonl"
    changed.write_text(changed.read_text().replace("document", "another_"))
    assert _tokenize(texts, tmp_path) == 0
    assert tokenised == ["00001.bin", "00002.bin"]


def test_an_edit_that_changes_no_identity_is_tokenised(tmp_path):
    file, held_out = tmp_path / "text.txt", tmp_path / "held_out.txt"
    file.write_text("a" * 400_000)
    held_out.write_text("c")
    texts = ([str(file)], [str(held_out)])
    assert _tokenize(texts, tmp_path / "out") == 0
    file.write_text("a" * 100_000 + "b" + "a" * 299_999)
    later = (tmp_path / "out" / "train" / "00000.json").stat().st_mtime + 1
    os.utime(file, (later, later))
    assert _tokenize(texts, tmp_path / "out") == 0
    ids = np.fromfile(tmp_path / "out" / "train" / "00000.bin", np.uint16)
    assert ids[100_000] == ord("b")


def test_of_an_earlier_call_for_other_text_nothing_is_read(texts, tmp_path):
    assert _tokenize(texts, tmp_path) == 0
    (folder,), held_out = texts
    fewer = [f"{folder}/a.parquet"]
    assert _tokenize((fewer, held_out), tmp_path) == 0
    assert len(load_corpora(DataConfig(corpus=str(tmp_path / "local.yaml")))[0].train) == 1
    rows = [{"text": f"text {i}", "title": f"title {i}"} for i in range(9)]
    file_lists = [[str(tmp_path / f"{part}.parquet")] for part in ("both", "held-both")]
    for (path,) in file_lists:
        pq.write_table(pa.Table.from_pylist(rows), path)
    for field in ("title", "text"):
        assert _tokenize(file_lists, tmp_path, "--text-field", field) == 0
        ids = np.fromfile(tmp_path / "train" / "00000.bin", np.uint16)
        assert ids[:5].tolist() == list(field[:5].ljust(5).encode())


def test_another_end_of_document_token_is_another_tokenizer(texts, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    content = json.loads(build_tokenizer("bytes").to_str())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 257, "content": "<eos>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    end = {"eos_token": content["added_tokens"][0]["content"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    name = f"hf:{folder}"
    _tokenize(texts, tmp_path / "tokens", "--tokenizer", name)
    files, held_out = texts
    text = load_corpora(DataConfig(corpus="local", files=files, validation_files=held_out))
    _, state = _stream(text, tokenizer=name)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with pytest.raises(DataStateMismatch, match="end-of-document id 256 and this run has 257"):
        _stream(text, state, tokenizer=name)
    tokens = load_corpora(DataConfig(corpus=str(tmp_path / "tokens" / "local.yaml")))
    with pytest.raises(ValueError, match=r"00000\.bin: documents end with id 256, .* with 257"):
        _stream(tokens, tokenizer=name)
    _tokenize(texts, tmp_path / "tokens", "--tokenizer", name)
    assert _stream(tokens, tokenizer=name)[1]["eot_id"] == 257


def test_a_full_disk_names_the_file(texts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tokens"
    real = Path.open

    def full(path, *arguments, **options):
        return real(Path("/dev/full") if path.suffix == ".bin" else path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    assert _tokenize(texts, out) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "No space left on device; the same command goes on once it can be written" in error
    assert error.endswith("tokens/train/00000.bin'")
    monkeypatch.undo()
    assert _tokenize(texts, out) == 0


def test_the_folder_of_another_corpus_is_left_alone(texts, tmp_path, cli_here):
    assert _tokenize(texts, tmp_path) == 0
    before = (tmp_path / "train" / "00000.bin").read_bytes()
    error = cli_here(
        "data", "tokenize", "sample", tmp_path, "--tokenizer", "bytes", status=1
    ).stderr
    assert "holds the tokens of another corpus (local.yaml)" in error
    assert (tmp_path / "train" / "00000.bin").read_bytes() == before


def test_what_does_not_belong_together_is_refused(texts, tmp_path, gpt2_cache):
    assert _tokenize(texts, tmp_path) == 0
    tokens = load_corpora(DataConfig(corpus=str(tmp_path / "local.yaml")))
    with pytest.raises(ValueError, match=r"was tokenised by 'bytes' and data.tokenizer is 'gpt2'"):
        _stream(tokens, tokenizer="gpt2")
    path = tmp_path / "train" / "00001.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"00001\.bin has changed since it was written: run"):
        assert tokens[0].fingerprint
    path.write_bytes(bytes(content[:-2]))
    with pytest.raises(ValueError, match=r"00001\.bin has [\d,]+ bytes and its index says"):
        _stream((replace(tokens[0], train=tokens[0].train[1:2]),))


def test_inspect_counts(texts, cli_here):
    files, held_out = texts
    command = ["data", "inspect", "local", "--tokenizer", "bytes", "--samples", "1"]
    shown = cli_here(*command, "--files", *files, "--validation-files", *held_out).stdout
    every = [text for shard in range(3) for text in _texts(shard)]
    full = [text for text in every if text]
    assert "train: 3 files" in shown
    assert f"documents   {len(full):,}, {len(every) - len(full)} empty" in shown
    assert f"tokens      {sum(len(text) + 1 for text in full):,}\n" in shown
    duplicates = len(full) - len({text.strip() for text in full})
    assert f"duplicates  {duplicates}" in shown
    assert "held-out documents that are in train: 26 (100.00%)" in shown
    assert "--- sample 1 ---\ndocument 1 of 0" in shown
    shown = cli_here(*command, "--limit", "10", "--files", *files).stdout
    assert re.search(r"train: .*\n  documents   10 .the first 10.", shown)
    # A hundredth of the documents is held out: they are looked for in all of the text.
    held_out = re.search(r"held out: .*\n  documents   (\d+), .* or of the other split", shown)
    assert int(held_out[1]) > 0
    assert "that are in train as far as it was read: " in shown


@pytest.mark.usefixtures("gpt2_cache")
def test_inspect_refuses_tokens_of_another_tokenizer(texts, tmp_path, error_of):
    assert _tokenize(texts, tmp_path / "tokens") == 0
    tokens = str(tmp_path / "tokens" / "local.yaml")
    error = error_of("data", "inspect", tokens, "--tokenizer", "gpt2")
    assert "was tokenised by 'bytes' and data.tokenizer is 'gpt2'" in error


@pytest.mark.slow
def test_processes_that_tokenize_die_with_a_killed_command(tmp_path):
    text = json.dumps({"text": "a document " * 400}) + "\n"
    for shard in range(4):
        (tmp_path / f"{shard}.jsonl").write_text(text * 2_000)
    command = [sys.executable, "-m", "sparsellm", "data", "tokenize", "local", f"{tmp_path}/out"]
    command += ["--files", f"{tmp_path}/*.jsonl", "--tokenizer", "bytes", "--workers", "2"]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children, deadline = [], time.monotonic() + 60
    # The resource tracker, the server of processes and two of these.
    while len(children) < 4 and time.monotonic() < deadline:
        children = process.children(recursive=True)
        time.sleep(0.05)
    assert len(children) >= 4
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
