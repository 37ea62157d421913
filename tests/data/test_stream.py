"""Every document once an epoch, every token a target once, and cursors that restore exactly."""

import gzip
import json
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sparsellm.data.stream import Cursor, LaneConfig, documents, pack
from sparsellm.data.text.blocks import BlockCache
from sparsellm.data.text.shards import to_shard
from sparsellm.data.tokenizer import ByteTokenizer

EOT = ByteTokenizer.eot_id
quiet = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _write(folder, sizes, row_group_size, fmt="parquet"):
    """Shards of ``sizes`` documents; a document's text names it, and some are empty or long."""
    shards = []
    for index, size in enumerate(sizes):
        texts = [_text(index, row) for row in range(size)]
        path = folder / f"{index:03d}.{fmt}"
        if fmt == "parquet":
            pq.write_table(pa.table({"text": texts}), path, row_group_size=row_group_size)
        else:
            data = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
            path.write_bytes(gzip.compress(data) if fmt.endswith(".gz") else data)
        shards.append(to_shard(str(path), "text"))
    return tuple(shards)


def _text(shard, row):
    if (shard + row) % 7 == 6:
        return ""
    return f"<{shard}/{row}>" * (1 + (shard * 3 + row * 5) % 9)


@quiet
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    row_group_size=st.integers(1, 8),
    num_lanes=st.integers(1, 6),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
    fmt=st.sampled_from(["parquet", "jsonl", "jsonl.gz"]),
)
def test_lanes_share_out_every_document_exactly_once(  # noqa: PLR0917
    tmp_path_factory, sizes, row_group_size, num_lanes, seed, epoch, fmt
):
    shards = _write(tmp_path_factory.mktemp("shards"), sizes, row_group_size, fmt)
    expected = Counter(_text(s, r) for s, size in enumerate(sizes) for r in range(size))
    del expected[""]
    occurrences: Counter[str] = Counter()
    for lane in range(num_lanes if expected else 0):
        config = LaneConfig(shards, lane, num_lanes, seed)
        for document in documents(config, BlockCache(), Cursor(epoch=epoch)):
            if document.start.epoch != epoch:
                break
            occurrences[document.content] += 1
    assert occurrences == expected


def test_a_worker_reads_the_shards_of_its_own_group_alone(tmp_path):
    """Else every worker would decompress all of the corpus."""
    shards = _write(tmp_path, [40] * 16, row_group_size=6, fmt="jsonl.gz")
    opened, read = [], []
    for rank in range(8):  # of two workers each: three lanes a worker
        blocks = BlockCache()
        for lane in range(rank, 48, 16):
            for document in documents(LaneConfig(shards, lane, 48, 0), blocks, Cursor()):
                if document.start.epoch:
                    break
                opened.append(document.content)
        read.append(len({url for url, _ in blocks._blocks}))
        for lane in range(rank + 8, 48, 16):
            for document in documents(LaneConfig(shards, lane, 48, 0), blocks, Cursor()):
                if document.start.epoch:
                    break
                opened.append(document.content)
    expected = Counter(_text(s, r) for s in range(16) for r in range(40))
    del expected[""]
    assert Counter(opened) == expected
    assert max(read) <= 8  # four of each of the epochs 0 and 1, which is begun


@pytest.mark.parametrize(("sizes", "groups"), [([40] * 24, 6), ([1000, *[5] * 23], 1)])
def test_most_text_is_read_before_any_is_read_often(tmp_path, sizes, groups):
    """Lanes that have only small files would read them again and again meanwhile."""
    shards = _write(tmp_path, sizes, row_group_size=6, fmt="jsonl")
    configs = [LaneConfig(shards, lane, 6, seed=0) for lane in range(6)]
    assert configs[0].groups == groups
    texts = {_text(s, row) for s, size in enumerate(sizes) for row in range(size)} - {""}
    lanes = [
        islice(documents(config, BlockCache(), Cursor()), len(texts) // 6) for config in configs
    ]
    read = {document.content for lane in lanes for document in lane}
    assert len(read) > 0.95 * len(texts)


def test_order_differs_by_epoch_and_seed_and_repeats_otherwise(tmp_path):
    shards = _write(tmp_path, [20] * 8, row_group_size=6)

    def order(seed, epoch):
        stream = documents(LaneConfig(shards, 0, 1, seed), BlockCache(), Cursor(epoch=epoch))
        return [d.content for d in islice(stream, 100)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def _joined(config, num_tokens):
    """The eot-joined documents, straight from the shards' order."""
    tokens = []
    for document in documents(config, BlockCache(), Cursor()):
        tokens += [*document.content.encode(), EOT]
        if len(tokens) > num_tokens:
            return tokens[:num_tokens]
    raise AssertionError


@quiet
@given(context_length=st.integers(1, 40), lane=st.integers(0, 1))
def test_packing_loses_and_repeats_nothing(tmp_path_factory, context_length, lane):
    shards = _write(tmp_path_factory.mktemp("shards"), [11, 5, 0, 9], row_group_size=3)
    config = LaneConfig(shards, lane, 2, seed=5)
    count = 2000 // context_length  # well into the second epoch
    sequences = [
        s
        for s, _ in islice(
            pack(config, BlockCache(), ByteTokenizer(), context_length, Cursor()), count
        )
    ]
    for before, after in pairwise(sequences):
        assert before[-1] == after[0]
    targets = [int(sequences[0][0])] + [int(t) for s in sequences for t in s[1:]]
    assert targets == _joined(config, len(targets))


@quiet
@given(
    context_length=st.integers(1, 60),
    stops=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    fmt=st.sampled_from(["parquet", "jsonl", "jsonl.gz"]),
)
def test_cursor_restores_after_any_sequence_again_and_again(
    tmp_path_factory, context_length, stops, fmt
):
    shards = _write(tmp_path_factory.mktemp("shards"), [6, 0, 4, 7], row_group_size=3, fmt=fmt)
    config = LaneConfig(shards, 0, 1, seed=5)
    tokenizer = ByteTokenizer()
    straight = pack(config, BlockCache(), tokenizer, context_length, Cursor())
    cursor = Cursor()
    for stop in stops:
        resumed = pack(config, BlockCache(), tokenizer, context_length, cursor)
        for _ in range(stop + 1):
            (expected, expected_cursor), (sequence, cursor) = next(straight), next(resumed)
            np.testing.assert_array_equal(sequence, expected)
            assert cursor == expected_cursor


def test_a_lane_with_nothing_in_an_epoch_continues_to_the_next(tmp_path):
    shards = _write(tmp_path, [1], row_group_size=1)
    starts = [
        next(documents(LaneConfig(shards, lane, 3, seed=0), BlockCache(), Cursor())).start.epoch
        for lane in range(3)
    ]
    assert sorted(starts) == [0, 1, 2]  # every epoch has the document once


def test_a_lane_waits_for_the_one_shard_with_text(tmp_path):
    shards = _write(tmp_path, [3 if shard == 7 else 0 for shard in range(24)], 1, "jsonl")
    expected = {_text(7, row) for row in range(3)}
    for seed in range(60):  # of 6 lanes with 4 of 24 shards each, one may wait for 30 epochs
        lane = documents(LaneConfig(shards, 0, 6, seed, num_groups=6), BlockCache(), Cursor())
        assert {document.content for document in islice(lane, 3)} == expected


def test_a_corpus_without_documents_says_so(tmp_path):
    shards = _write(tmp_path, [0, 0], row_group_size=1)
    with pytest.raises(ValueError, match=r"no document with text in 2 files.*000\.parquet"):
        next(documents(LaneConfig(shards, 0, 2, seed=0), BlockCache(), Cursor()))
