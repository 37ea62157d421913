"""Every document once an epoch, every token a target once, and cursors that restore exactly."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsellm.data.corpus import Shard
from sparsellm.data.stream import Cursor, StreamConfig, documents, pack
from sparsellm.data.tokenizer import ByteTokenizer

EOT = ByteTokenizer.eot_id
quiet = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
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
            path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        shards.append(Shard(str(path), fmt))
    return tuple(shards)


def _text(shard, row):
    if (shard + row) % 7 == 6:
        return ""
    return f"<{shard}/{row}>" * (1 + (shard * 3 + row * 5) % 9)


@quiet
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    row_group_size=st.integers(1, 8),
    num_consumers=st.integers(1, 5),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
def test_consumers_share_out_every_document_exactly_once(  # noqa: PLR0917
    tmp_path_factory, sizes, row_group_size, num_consumers, seed, epoch
):
    shards = _write(tmp_path_factory.mktemp("shards"), sizes, row_group_size)
    expected = Counter(_text(s, r) for s, size in enumerate(sizes) for r in range(size))
    del expected[""]
    seen: Counter[str] = Counter()
    for consumer in range(num_consumers):
        config = StreamConfig(shards, consumer, num_consumers, seed)
        # A consumer with nothing in this epoch says so; with many documents none may.
        with contextlib.suppress(ValueError):
            for document in documents(config, Cursor(epoch=epoch)):
                if document.start.epoch != epoch:
                    break
                seen[document.text] += 1
    assert seen == expected


def test_order_differs_by_epoch_and_seed_and_repeats_otherwise(tmp_path):
    shards = _write(tmp_path, [20] * 8, row_group_size=6)

    def order(seed, epoch):
        stream = documents(StreamConfig(shards, 0, 1, seed), Cursor(epoch=epoch))
        return [d.text for d in islice(stream, 100)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def _joined(config, num_tokens):
    """The eot-joined documents, straight from the shards' order."""
    tokens = []
    for document in documents(config, Cursor()):
        tokens += [*document.text.encode(), EOT]
        if len(tokens) > num_tokens:
            return tokens[:num_tokens]
    raise AssertionError


@quiet
@given(context_length=st.integers(1, 40), consumer=st.integers(0, 1))
def test_packing_loses_and_repeats_nothing(tmp_path_factory, context_length, consumer):
    shards = _write(tmp_path_factory.mktemp("shards"), [11, 5, 0, 9], row_group_size=3)
    config = StreamConfig(shards, consumer, 2, seed=5)
    count = 2000 // context_length  # well into the second epoch
    sequences = [
        s for s, _ in islice(pack(config, ByteTokenizer(), context_length, Cursor()), count)
    ]
    for before, after in pairwise(sequences):
        assert before[-1] == after[0]
    targets = [int(sequences[0][0])] + [int(t) for s in sequences for t in s[1:]]
    assert targets == _joined(config, len(targets))


@quiet
@given(
    context_length=st.integers(1, 60),
    stops=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    fmt=st.sampled_from(["parquet", "jsonl"]),
)
def test_cursor_restores_after_any_sequence_again_and_again(
    tmp_path_factory, context_length, stops, fmt
):
    shards = _write(tmp_path_factory.mktemp("shards"), [6, 0, 4, 7], row_group_size=3, fmt=fmt)
    config = StreamConfig(shards, 0, 1, seed=5)
    tokenizer = ByteTokenizer()
    straight = pack(config, tokenizer, context_length, Cursor())
    cursor = Cursor()
    for stop in stops:
        resumed = pack(config, tokenizer, context_length, cursor)
        for _ in range(stop + 1):
            (expected, expected_cursor), (found, cursor) = next(straight), next(resumed)
            np.testing.assert_array_equal(found, expected)
            assert cursor == expected_cursor


def test_a_consumer_without_documents_says_so(tmp_path):
    shards = _write(tmp_path, [1], row_group_size=1)
    config = StreamConfig(shards, 1, 2, seed=0)
    with pytest.raises(ValueError, match=r"consumer 1 of 2 finds no document.*num_workers"):
        next(documents(config, Cursor()))
