"""Missing, damaged and strange shards are named, whoever reads them; killed workers too."""

import gzip
import json
import os
import random
import signal
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.loaders import token_loader
from sparsellm.data.text.blocks import BlockCache, documents_in_order
from sparsellm.data.text.corpus import Corpus, load_corpus
from sparsellm.data.text.json_lines import BLOCK_BYTES
from sparsellm.data.text.shards import to_shard


def _loader(corpus, num_workers, context_length=64):
    options = {"context_length": context_length, "micro_batch_size": 2}
    return token_loader((corpus,), num_workers=num_workers, **options)


@pytest.fixture
def folder(tmp_path):
    """A corpus of 200 shards of Parquet."""
    table = pa.table({"text": [f"document {row} " * 20 for row in range(30)]})
    for index in range(200):
        pq.write_table(table, tmp_path / f"{index:03d}.parquet", row_group_size=10)
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_a_shard_that_goes_missing_ends_the_run_with_its_name(folder, num_workers):
    loader = _loader(load_corpus("local", files=[str(folder)]), num_workers)
    next(loader)
    for index in range(100, 200):
        (folder / f"{index}.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"1\d\d\.parquet is missing .*; restore it"):
        list(islice(loader, 20_000))
    loader.close()


def test_a_killed_worker_is_named(folder):
    loader = _loader(load_corpus("local", files=[str(folder)]), 2)
    next(loader)
    os.kill(loader.worker_pids[1], signal.SIGKILL)
    with pytest.raises(OSError, match=r"data worker 1 of 2 \(process \d+\) was killed by SIGKILL"):
        list(islice(loader, 20_000))
    loader.close()


def test_shared_memory_is_not_used(folder):
    before = {path.name for path in Path("/dev/shm").iterdir()}
    loader = _loader(load_corpus("local", files=[str(folder)]), 2)
    list(islice(loader, 50))
    added = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in added if "torch" in name]
    loader.close()


def test_a_pipe_is_refused_and_a_folder_is_all_that_is_in_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "a" / "notes.pdf").write_text("not text")
    corpus = load_corpus("local", files=[str(tmp_path)])
    assert [shard.url for shard in corpus.train] == [str(tmp_path / "a" / "x.jsonl")]
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"b\.jsonl is not a regular file \(a pipe"):
        load_corpus("local", files=[f"{tmp_path}/*.jsonl"])


def test_an_empty_corpus_is_named(tmp_path):
    for name, content in (("a.jsonl", ""), ("b.jsonl", '{"text": ""}\n' * 50)):
        (tmp_path / name).write_text(content)
    with pytest.raises(
        ValueError, match=r"corpus local: no document with text in 2 files \(.*a\.jsonl"
    ):
        _loader(load_corpus("local", files=[str(tmp_path)]), 0)


def _lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def _content(path):
    """What is read of a file, or the error."""
    try:
        return [
            text for texts in documents_in_order((to_shard(str(path), "text"),)) for text in texts
        ]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_parquet_is_an_error_with_its_name_or_the_text(tmp_path, seed):
    """With page checksums, which are verified, damage is never other text."""
    chance = random.Random(seed)
    texts = [f"document {row}: naïve " * chance.randint(0, 30) for row in range(200)]
    path = tmp_path / "a.parquet"
    compression = ["none", "snappy", "zstd", "none"][seed]
    pq.write_table(
        pa.table({"text": texts}),
        path,
        row_group_size=40,
        compression=compression,
        write_page_checksum=True,
    )
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 20)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged))
        content = _content(path)
        assert content == texts or "a.parquet" in content, content


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_damaged_stream_is_named(tmp_path, cut):
    lines = b"".join(
        b'{"text": "%d %s"}\n' % (i, os.urandom(40).hex().encode()) for i in range(9999)
    )
    packed = gzip.compress(lines)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[: int(cut * len(packed))])
    assert "a.jsonl.gz" in _content(path)
    damaged = bytearray(packed)
    damaged[int(cut * len(packed)) : int(cut * len(packed)) + 50] = bytes(50)
    path.write_bytes(bytes(damaged))
    assert "a.jsonl.gz" in _content(path)


def test_lines_of_any_length_come_once_and_are_numbered(tmp_path):
    """A block has the lines that begin within its bytes: some have none, some a huge one."""
    chance = random.Random(1)
    sizes = [chance.choice([0, 10, 1000, BLOCK_BYTES // 3, 3 * BLOCK_BYTES]) for _ in range(16)]
    texts = [chr(97 + i % 26) * size for i, size in enumerate(sizes)]
    path = tmp_path / "a.jsonl"
    path.write_text(_lines(texts))
    assert _content(path) == texts
    with path.open("a") as file:
        file.write("{oops")  # without a line feed
    assert "a.jsonl: line 17 is not JSON" in _content(path)


def test_a_stream_is_read_from_several_places(tmp_path):
    texts = [f"{i} " * 20_000 for i in range(400)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(_lines(texts).encode(), 1))
    shard = to_shard(str(path), "text")
    blocks = BlockCache(most_bytes=0)
    sizes = []
    while (size := blocks.size(shard, len(sizes))) is not None:
        sizes.append(size)
    assert sum(sizes) == 400
    assert len(sizes) > 5
    for block in (4, 0, 5, 1, 4, 2):
        (first,) = blocks.documents(shard, block, np.array([0]))
        assert first == texts[sum(sizes[:block])]


def test_plain_text_may_be_packed(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert _content(tmp_path / "a.txt") == ["café"]
    assert _content(tmp_path / "b.txt.gz") == ["packed"]


def test_one_document_of_megabytes_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 1_000_000)
    corpus = Corpus("a", (to_shard(str(tmp_path / "a.txt"), "text"),), ())
    rows = list(islice(_loader(corpus, 0, context_length=1000), 100))
    assert "".join(chr(t) for row in rows[0] for t in row[:-1].tolist())[:10] == "word word "
    assert all(int(row.max()) < 256 for row in rows)
