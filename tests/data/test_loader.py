"""The loader: exact state despite workers and prefetch, disjoint ranks, clear refusals."""

import gzip
import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import python
from warm import started

from data.loaders import token_loader
from sparsellm.data.first_look import check_text
from sparsellm.data.held_out import validated, validation_batches
from sparsellm.data.position import DataStateMismatch, merge
from sparsellm.data.text import identity
from sparsellm.data.text.corpus import load_corpora, load_corpus
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.recipe.sections import DataConfig
from sparsellm.training.objective import IGNORED_TARGET
from sparsellm.training.validation import ValidationSet

SHAPE = {"context_length": 64, "micro_batch_size": 3}


def _loader(corpus=None, tokenizer="bytes", **changes):
    options = {"seed": 1} | SHAPE | changes
    return token_loader((corpus or load_corpus("sample"),), tokenizer, **options)


def _held_out(corpus, num_tokens=64, rank=0, world_size=1):
    tokenizer = load_tokenizer("bytes")
    options = {"num_tokens": num_tokens, "rank": rank, "world_size": world_size}
    return list(validation_batches(corpus, tokenizer, **options, **SHAPE))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_state_restores_exactly_twice_in_a_row(num_workers):
    straight = _loader(num_workers=num_workers)
    expected = list(islice(straight, 17))
    straight.close()
    assert expected[0].shape == (3, 65)
    assert expected[0].dtype == torch.int64

    batches, state = [], None
    for count in (4, 6, 7):  # no multiple of the workers: the next one's turn matters
        loader = _loader(num_workers=num_workers)
        if state:
            loader.load_state_dict(state)
        batches += list(islice(loader, count))
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert all(torch.equal(a, b) for a, b in zip(expected, batches, strict=True))


def test_a_bookmark_is_the_state_that_was_there():
    loader = _loader(num_workers=1)
    next(loader)
    before, state = loader.position, loader.state_dict()
    expected = next(loader)
    assert loader.state_dict(before) == state != loader.state_dict()
    loader.go_back(before)
    assert torch.equal(next(loader), expected)
    loader.close()


def test_gpt2_on_real_parquet_resumes_across_epochs(test_data, gpt2_cache):
    files = [str(test_data / "corpus" / "validation.parquet")]
    corpus = load_corpus("local", files=files)
    options = {"tokenizer": "gpt2", "context_length": 1024, "micro_batch_size": 64}
    loader = _loader(corpus, **options)
    batches = list(islice(loader, 5))  # 464,743 tokens: the epoch ends in the eighth
    state = loader.state_dict()
    expected = list(islice(loader, 5))
    assert {lane["cursors"]["local"][0] for lane in state["lanes"].values()} == {0}
    epochs = {lane["cursors"]["local"][0] for lane in loader.state_dict()["lanes"].values()}
    assert 1 in epochs
    resumed = _loader(corpus, **options)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(expected, islice(resumed, 5), strict=True))
    assert max(int(b.max()) for b in batches) == 50_256  # documents are ended


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 9}, "seed 1 and this run has 9"),
        ({"tokenizer": "gpt2"}, "tokenizer 'bytes' and this run has 'gpt2'"),
        ({"corpus": "local"}, "is of corpus sample and this run reads local"),
    ],
)
def test_other_data_is_refused(change, named, tmp_path, gpt2_cache):
    state = merge([_loader().state_dict()])
    if change.get("corpus"):
        (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
        change = {"corpus": load_corpus("local", files=[f"{tmp_path}/*.jsonl"])}
    with pytest.raises(DataStateMismatch, match=named):
        _loader(**change).load_state_dict(state)


def test_another_text_of_the_same_name_and_size_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    states = []
    for letter in "xyx":
        path.write_text(json.dumps({"text": letter * 100_000}) + "\n")
        corpus = load_corpus("local", files=[str(path)])
        states.append(_loader(corpus).state_dict())
    _loader(corpus).load_state_dict(merge(states[:1]))
    with pytest.raises(DataStateMismatch, match=r"files of corpus local are not those.*changed"):
        _loader(corpus).load_state_dict(merge(states[1:2]))


def test_another_column_of_the_same_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"title": "a" * 9000, "text": "b" * 9000}) + "\n")
    titles, texts = (load_corpus("local", files=[str(path)], text_field=f) for f in ("title", None))
    state = merge([_loader(titles).state_dict()])
    _loader(titles).load_state_dict(state)
    with pytest.raises(DataStateMismatch, match=r"its text is in another column"):
        _loader(texts).load_state_dict(state)


@pytest.mark.parametrize("end", ["parquet", "jsonl", "jsonl.gz"])
def test_a_mixture_of_two_columns_of_one_file_reads_both(tmp_path, end):
    path = tmp_path / f"a.{end}"
    table = pa.table({"title": ["a" * 100] * 99, "text": ["b" * 100] * 99})
    if end == "parquet":
        pq.write_table(table, path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        path.write_bytes(gzip.compress(lines) if end.endswith("gz") else lines)
    for field in ("title", "text"):
        (tmp_path / f"{field}.yaml").write_text(
            f"source: files\nfiles: {path}\ntext_field: {field}\n"
        )
    weights = {str(tmp_path / f"{field}.yaml"): 1.0 for field in ("title", "text")}
    corpora = load_corpora(DataConfig(corpus=weights))
    loader = token_loader(corpora, **SHAPE)
    letters = Counter(chr(token) for rows in islice(loader, 20) for token in rows[:, 5].tolist())
    assert 20 <= letters["a"] <= 40
    assert 20 <= letters["b"] <= 40


def _edit_in_the_dark(path, letter):
    """An edit that keeps the size, where the fingerprint does not look."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(letter.encode())


def test_an_edit_anywhere_in_a_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 1_000_000}) + "\n")
    files = [str(path)]
    state = merge([_loader(load_corpus("local", files=files)).state_dict()])
    path.touch()  # as a copy does
    _loader(load_corpus("local", files=files)).load_state_dict(state)
    _edit_in_the_dark(path, "y")
    edited = load_corpus("local", files=files)
    assert edited.fingerprint == state["corpora"]["local"]
    with pytest.raises(DataStateMismatch, match=r"a file of corpus local was edited since"):
        _loader(edited).load_state_dict(state)
    _edit_in_the_dark(path, "x")
    _loader(load_corpus("local", files=files)).load_state_dict(state)


def test_of_a_large_corpus_files_that_were_written_since_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 1_000_000}) + "\n")
    files = [str(path)]
    state = merge([_loader(load_corpus("local", files=files)).state_dict()])
    assert _loader(load_corpus("local", files=files)).load_state_dict(state) == []
    _edit_in_the_dark(path, "y")
    (note,) = _loader(load_corpus("local", files=files)).load_state_dict(state)
    assert note.startswith("files of corpus local were written since: edited or only copied?")


def test_other_held_out_text_is_told(tmp_path):
    for name in ("a", "held"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "x" * 9000}) + "\n")
    data_config = {
        "files": [f"{tmp_path}/a.jsonl"],
        "validation_files": [f"{tmp_path}/held*.jsonl"],
    }
    state = merge([_loader(load_corpus("local", **data_config)).state_dict()])
    assert _loader(load_corpus("local", **data_config)).load_state_dict(state) == []
    (tmp_path / "held2.jsonl").write_text(json.dumps({"text": "y"}) + "\n")
    (note,) = _loader(load_corpus("local", **data_config)).load_state_dict(state)
    assert note.startswith("the held-out text of corpus local has changed: losses before and")


def test_a_position_of_another_format_is_refused():
    other = _loader().state_dict() | {"format": 3}
    with pytest.raises(DataStateMismatch, match="in a format that this one does not know"):
        merge([other])


def test_what_is_started_early_gives_the_same():
    early, unstarted = _loader(num_workers=2), _loader(num_workers=2)
    early.start()
    pids = early.worker_pids
    assert len(pids) == 2
    for first, second in zip(islice(early, 20), islice(unstarted, 20), strict=True):
        assert torch.equal(first, second)
    early.start()
    assert early.worker_pids == pids
    early.close()
    unstarted.close()


@pytest.mark.parametrize(("num_workers", "early"), [(0, False), (1, False), (1, True)])
def test_a_workers_error_is_the_users_one_line_when_it_is_read(num_workers, early, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' * 2000 + "{oops\n")
    corpus = load_corpus("local", files=[f"{tmp_path}/*.jsonl"])
    loader = _loader(corpus, num_workers=num_workers)
    if early:
        loader.start()
    with pytest.raises(ValueError, match=r"bad\.jsonl: line 2001 is not JSON") as error:
        list(islice(loader, 100))
    loader.close()
    assert "\n" not in str(error.value)


def test_validation_is_the_same_on_any_number_of_ranks():
    corpus = load_corpus("sample")

    def sequences(rank, world_size):
        return [row for batch in _held_out(corpus, 64 * 11, rank, world_size) for row in batch]

    whole = sequences(0, 1)
    assert len(whole) == 11
    for world_size in (2, 3, 4):
        parts = [sequences(rank, world_size) for rank in range(world_size)]
        for index, row in enumerate(whole):
            assert torch.equal(parts[index % world_size][index // world_size], row)


def test_a_rank_without_held_out_sequences_has_the_shape_of_the_others():
    corpus = load_corpus("sample")
    shapes = [batch.shape for rank in (0, 1) for batch in _held_out(corpus, 64, rank, 2)]
    assert shapes == [(1, 65), (0, 65)]
    # And so it can pad to as many sequences as they have.
    none = ValidationSet(_held_out(corpus, 64, 1, 2), 3, torch.device("cpu"))
    inputs_BT, targets_BT = none._batch(0, torch.device("cpu"))
    assert inputs_BT.shape == targets_BT.shape == (3, 64)
    assert (targets_BT == IGNORED_TARGET).all()


def test_held_out_text_that_ends_early_is_a_warning(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 200}) + "\n")
    files = [f"{tmp_path}/*.jsonl"]
    corpus = load_corpus("local", files=files)
    corpus = replace(corpus, validation=corpus.train)
    assert sum(len(_held_out(corpus, 640, rank, 2)[0]) for rank in (0, 1)) == 3
    warning = "ends after 192 of the 640 tokens asked for"
    assert caplog.text.count(warning) == 1  # by one rank
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"shorter than one sequence.*data\.validation_files"):
        _held_out(corpus)


def test_text_of_ones_own_needs_held_out_text_of_ones_own(tmp_path, monkeypatch):
    """The YAML's would be of other text, and names a variable that need not be set."""
    monkeypatch.delenv("SPARSELLM_DATA", raising=False)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    corpus = load_corpus("local", files=[f"{tmp_path}/*.jsonl"])
    assert [Path(shard.url).name for shard in corpus.train] == ["a.jsonl"]
    with pytest.raises(
        ValueError, match=r"no held-out text: .*data\.validation_files.*validation\.every_steps=0"
    ):
        _held_out(corpus)


def test_a_corpus_of_a_mixture_that_is_not_validated_on_is_named(tmp_path, caplog):
    for name, further in (("a", "validation_fraction: 0.5"), ("b", "")):
        (tmp_path / f"{name}.txt").write_text(f"{name} few words " * 100)
        lines = ["source: files", f"files: [{tmp_path / name}.txt]", further]
        (tmp_path / f"{name}.yaml").write_text("\n".join(lines))
    shares = {str(tmp_path / f"{name}.yaml"): 1.0 for name in "ab"}
    corpora = load_corpora(DataConfig(corpus=shares, tokenizer="bytes"))
    assert [corpus.name for corpus in validated(corpora, load_tokenizer("bytes"), 8)] == ["a"]
    [message] = caplog.messages
    assert "no text of b is held out: the validation loss is that of the mixture's" in message


def test_a_share_that_is_too_short_is_not_validated_on(tmp_path, caplog):
    path = tmp_path / "a.txt"
    path.write_text("a few words " * 100)
    data = DataConfig(corpus=str(path), tokenizer="bytes")
    corpora = load_corpora(data)
    assert validated(corpora, load_tokenizer("bytes"), 8) == list(corpora)
    assert not caplog.messages
    assert validated(corpora, load_tokenizer("bytes"), 64) == []
    check_text(data, 64, validates=True)
    [message] = caplog.messages  # once
    assert "shorter than one sequence of 64 tokens; the run trains without validation" in message
    (tmp_path / "held.txt").write_text("few words")
    named = data.model_copy(update={"validation_files": [str(tmp_path / "held.txt")]})
    check_text(named, 64, validates=False)
    with pytest.raises(ValueError, match=r"shorter than one sequence.*data\.validation_files"):
        check_text(named, 64, validates=True)


def test_text_is_checked_without_torch(tmp_path):
    (tmp_path / "a.txt").write_text("a few words " * 100)
    code = (
        "import sys; from sparsellm.data.first_look import check_text as check; "
        "from sparsellm.recipe.sections import DataConfig as Data; "
        f"check(Data(corpus={str(tmp_path)!r}, tokenizer='bytes'), 8, True); "
        "sys.exit('torch' in sys.modules)"
    )
    python("-c", code)


PARENT = """
import multiprocessing, os, signal, threading
from sparsellm.data.text.corpus import load_corpus
from sparsellm.data.loader import TokenLoader
from sparsellm.data.tokenizer import load_tokenizer

def start():
    next(loader), next(loader)  # one of each worker: both are ready

if __name__ == "__main__":
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    loader = TokenLoader((load_corpus("sample"),), load_tokenizer("bytes"), context_length=64,
        micro_batch_size=2, seed=0, rank=0, world_size=1, num_workers=2)
    thread = threading.Thread(target=start)  # loaders need not be the main thread's
    thread.start()
    thread.join()
    print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    signal.sigwait({signal.SIGUSR2})
    raise RuntimeError("with the loader open")
"""


@pytest.fixture
def parent(tmp_path):
    """A process with a loader, in a process group of its own; its workers and their server."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with started(str(script)) as (process, printed):
        workers = [int(pid) for pid in next(printed).split()]
        assert len(workers) == 2
        yield process, printed, [*workers, int(_stat(workers[0])[1])]


@pytest.mark.slow
def test_workers_and_their_server_outlive_a_group_signal_and_die_with_a_killed_parent(parent):
    process, _, serving = parent
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.killpg(process.pid, number)
    time.sleep(0.5)
    assert all(_alive(pid) for pid in serving)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in serving) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in serving)


@pytest.mark.slow
def test_an_error_ends_the_process_though_the_loader_is_open(parent):
    process, printed, _ = parent
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 1
    assert list(printed)[-1] == "RuntimeError: with the loader open\n"


def _alive(pid):
    try:
        return _stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def _stat(pid):
    """State, parent, … of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
