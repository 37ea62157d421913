"""What reading costs: blocks that are kept in memory, and text that is tokenised again."""

import gzip
import json
import weakref
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsellm.data.lanes import Job, StreamConfig, make
from sparsellm.data.text import json_lines
from sparsellm.data.text.blocks import BlockCache
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.json_lines import _Lines
from sparsellm.data.text.readers import TextColumn
from sparsellm.data.text.shards import to_shard
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
    sequences = list(islice(make(Job(config, "bytes", 0, 1, dict.fromkeys(range(4))), first), 4000))
    lanes = {m.lane.number % 4: m.lane for m in sequences[:3600]}
    resumed = islice(make(Job(config, "bytes", 3600, 1, lanes), second), 400)
    for expected, sequence in zip(sequences[3600:], resumed, strict=True):
        assert np.array_equal(sequence.tokens_T1, expected.tokens_T1)
    assert second.count < first.count / 2


@pytest.mark.parametrize("num_cached", [1, 3])
@pytest.mark.parametrize(("end", "kind"), [("parquet", TextColumn), ("jsonl.gz", _Lines)])
def test_no_more_blocks_are_kept_than_their_bytes_allow(
    tmp_path, monkeypatch, end, kind, num_cached
):
    path = tmp_path / f"a.{end}"
    if end == "parquet":
        pq.write_table(pa.table({"text": ["x" * 1000] * 24}), path, row_group_size=2)
    else:  # a stream: to return it reads from the front again, also blocks that are kept
        monkeypatch.setattr(json_lines, "BLOCK_BYTES", 1024)
        line = json.dumps({"text": "x" * 51}).encode() + b"\n"
        path.write_bytes(gzip.compress(line * (12 * 1024 // len(line))))
    shard = to_shard(str(path), "text")
    live_blocks = weakref.WeakSet()
    make_block = kind.__init__

    def init(self, *arguments, **options):
        make_block(self, *arguments, **options)
        live_blocks.add(self)

    monkeypatch.setattr(kind, "__init__", init)
    probe = BlockCache()
    probe.size(shard, 0)
    (size,) = (block.num_bytes for block in live_blocks)
    del probe
    blocks = BlockCache(most_bytes=num_cached * size + size // 2)
    for _ in range(2):
        for index in (0, 1, 2, 0, 3, 1, *range(4, 12)):
            assert blocks.size(shard, index) > 0
            assert 1 <= len(live_blocks) <= num_cached
    assert len(live_blocks) == num_cached
