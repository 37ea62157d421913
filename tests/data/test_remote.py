"""Files at addresses through fsspec: an HTTP server with faults, and one in memory."""

import gzip
import json
import time
from itertools import islice

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.loaders import token_loader
from data.range_server import RangeServer
from sparsellm.data.position import DataStateMismatch, merge
from sparsellm.data.text import network
from sparsellm.data.text.corpus import load_corpus

NAMES = ("0.parquet", "1.jsonl.gz", "2.jsonl", "3.txt")


@pytest.fixture
def folder(tmp_path):
    """A file of each kind, of several blocks where there are such."""
    texts = [
        f"document {i} of some length, {i % 7} times {i * 37 % 1013}. " * 40 for i in range(3000)
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pq.write_table(pa.table({"text": texts}), tmp_path / NAMES[0], row_group_size=500)
    (tmp_path / NAMES[1]).write_bytes(gzip.compress(lines, 1))
    (tmp_path / NAMES[2]).write_bytes(lines)
    (tmp_path / NAMES[3]).write_text("plain text " * 1000)
    return tmp_path


@pytest.fixture
def impatient(monkeypatch):
    """Faults that last are given up within a second or two."""
    monkeypatch.setattr(network, "MAX_SECONDS", 1)
    monkeypatch.setattr(network, "LEAST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(network, "TIMEOUT_SECONDS", 0.5)


def _corpus(address):
    return load_corpus("local", files=[f"{address}/{name}" for name in NAMES])


def _loader(corpus, num_workers=0):
    options = {"context_length": 512, "micro_batch_size": 8}
    return token_loader((corpus,), num_workers=num_workers, **options)


def _rows(corpus, count, num_workers=0):
    loader = _loader(corpus, num_workers)
    rows = torch.cat(list(islice(loader, count)))
    loader.close()
    return rows


def test_http_gives_the_same_stream_and_resumes_through_faults(folder, monkeypatch):
    monkeypatch.setattr(network, "LEAST_WAIT_SECONDS", 0.1)
    expected = _rows(_corpus(folder), 300)
    with RangeServer(folder) as server:
        loader = _loader(_corpus(server.endpoint))
        batches = list(islice(loader, 100))
        state = merge([loader.state_dict()])
        resumed = _loader(_corpus(server.endpoint))
        assert resumed.load_state_dict(state) == []
        server.troubles = ["503", "cut", "reset"]
        batches += list(islice(resumed, 200))
        assert server.troubles == []
    assert torch.equal(torch.cat(batches), expected)


def test_workers_read_an_address(folder):
    with RangeServer(folder) as server:
        rows = _rows(_corpus(server.endpoint), 30, num_workers=2)
    assert torch.equal(rows, _rows(_corpus(folder), 30))


def test_a_file_system_in_memory_gives_the_same_stream_and_notices_an_edit(folder):
    memory = fsspec.filesystem("memory")
    for name in NAMES:
        memory.pipe(f"/corpus/{name}", (folder / name).read_bytes())
    loader = _loader(_corpus("memory://corpus"))
    rows = torch.cat(list(islice(loader, 40)))
    assert torch.equal(rows, _rows(_corpus(folder), 40))
    state = merge([loader.state_dict()])
    _loader(load_corpus("local", files=["memory://corpus/*"])).load_state_dict(state)
    memory.pipe("/corpus/3.txt", b"another text")
    with pytest.raises(DataStateMismatch, match="files of corpus local are not those"):
        _loader(_corpus("memory://corpus")).load_state_dict(state)
    memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        (NAMES[0], "slow"),
        (NAMES[1], "slow"),
        (NAMES[1], "cut"),
        (NAMES[2], "reset"),
        (NAMES[3], "503"),
    ],
)
def test_a_fault_that_lasts_is_named(folder, impatient, name, trouble):
    with RangeServer(folder) as server:
        loader = _loader(load_corpus("local", files=[f"{server.endpoint}/{name}"]))
        next(loader)
        resumed = _loader(load_corpus("local", files=[f"{server.endpoint}/{name}"]))
        server.always = trouble
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"{name}.*gave up after .*The same command"):
            list(islice(resumed, 3000))
        assert time.monotonic() - began < 30


def test_a_file_that_is_gone_or_refused_is_named(folder):
    with RangeServer(folder) as server:
        with pytest.raises(FileNotFoundError, match=r"gone\.jsonl is missing"):
            _loader(load_corpus("local", files=[f"{server.endpoint}/gone.jsonl"]))
        server.always = "403"
        with pytest.raises(ValueError, match=r"2\.jsonl.*access was refused"):
            _loader(load_corpus("local", files=[f"{server.endpoint}/2.jsonl"]))


def test_a_server_without_ranges_is_named(folder):
    with (
        RangeServer(folder, ranges=False) as server,
        pytest.raises(ValueError, match=r"0\.parquet: its server gives whole files only"),
    ):
        _loader(load_corpus("local", files=[f"{server.endpoint}/0.parquet"]))
