"""What reading costs: blocks that are kept in memory, and text that is tokenised again."""

from __future__ import annotations

import json
import weakref
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsellm.data.block_types import TextColumn
from sparsellm.data.blocks import BlockCache
from sparsellm.data.corpus import Corpus
from sparsellm.data.lanes import Share, StreamConfig, make
from sparsellm.data.shards import to_shard
from sparsellm.data.tokenizer import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    count = 0

    def encode_batch(self, texts):
        self.count += len(texts)
        return super().encode_batch(texts)


def test_a_resumed_lane_tokenises_nothing_that_lies_behind_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"<{i}>" * 40}) + "\n" for i in range(4000)))
    corpus = Corpus("a", (to_shard(str(path), "text"),), ())
    config = StreamConfig((corpus,), 64, seed=3, num_lanes=4)
    first, second = CountingTokenizer(), CountingTokenizer()
    made = list(islice(make(config, first, Share(0, 1), {}), 4000))
    lanes = {m.lane.number % 4: m.lane for m in made[:3600]}
    resumed = islice(make(config, second, Share(3600, 1), lanes), 400)
    for expected, found in zip(made[3600:], resumed, strict=True):
        assert np.array_equal(found.tokens_T1, expected.tokens_T1)
    assert second.count < first.count / 2


@pytest.mark.parametrize("kept", [1, 3])
def test_no_more_blocks_are_kept_than_their_bytes_allow(tmp_path, monkeypatch, kept):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 1000] * 24}), path, row_group_size=2)
    shard = to_shard(str(path), "text")
    made = weakref.WeakSet()
    make_column = TextColumn.__init__

    def init(self, *arguments, **options):
        make_column(self, *arguments, **options)
        made.add(self)

    monkeypatch.setattr(TextColumn, "__init__", init)
    probe = BlockCache()
    probe.size(shard, 0)
    (size,) = (block.num_bytes for block in made)
    del probe
    blocks = BlockCache(most_bytes=kept * size + size // 2)
    for _ in range(2):
        for index in range(12):
            assert blocks.size(shard, index) > 0
            assert 1 <= len(made) <= kept
    assert len(made) == kept
