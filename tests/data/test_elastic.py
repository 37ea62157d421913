"""The global stream does not depend on ranks and workers, nor on how often they change."""

import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from data.loaders import token_loader
from sparsellm.data.lanes import NUM_LANES, Job, LaneState, Picks, StreamConfig, make
from sparsellm.data.position import merge
from sparsellm.data.stream import Cursor, LaneConfig, documents
from sparsellm.data.text.blocks import BlockCache
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.shards import to_shard
from sparsellm.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
LENGTH = 32
slow = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _corpus(folder, name="a", num_documents=600, weight=1.0):
    """Documents of one to 400 bytes that say which they are: shorter and longer than a sequence."""
    texts = [f"<{name}{i}>" * (1 + i * 7 % 50) for i in range(num_documents)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Corpus(name, (to_shard(str(path), "text"),), (), weight)


def _loader(corpora, rank=0, world_size=1, num_workers=0, micro_batch_size=1):
    options = {"rank": rank, "world_size": world_size, "num_workers": num_workers, "seed": 3}
    shape = {"context_length": LENGTH, "micro_batch_size": micro_batch_size}
    return token_loader(corpora, **options, **shape)


def test_passes_over_the_text_are_counted_alike_by_any_number_of_ranks(tmp_path):
    corpora = (_corpus(tmp_path, "a", 300, 0.7), _corpus(tmp_path, "b", 40, 0.3))

    def counted(world_size):
        totals = np.zeros((12, 2, 2), np.int64)  # of each 84 sequences
        for rank in range(world_size):
            loader = _loader(corpora, rank, world_size)
            for part, _ in itertools.product(range(12), range(84 // world_size)):
                next(loader)
                totals[part] += loader.texts_2C
        return totals

    alone = counted(1)
    assert (alone[:, 0].sum(1) == 84).all()
    assert alone[0, 1].tolist() == [0, 0]
    epochs_b = alone[:, 1, 1] / alone[:, 0, 1]
    assert (np.diff(epochs_b) >= 0).all()
    tokens_b = sum(len(f"<b{i}>") * (1 + i * 7 % 50) + 1 for i in range(40))
    assert epochs_b[-1] == pytest.approx(alone[:, 0, 1].sum() * LENGTH / tokens_b - 0.5, abs=0.5)
    for world_size in (2, 7):
        assert (counted(world_size) == alone).all()


def _train(  # noqa: PLR0917
    corpora, state, world_size, num_sequences, num_workers=0, micro_batch_size=1
):
    """The next ``num_sequences`` of the global stream as ``world_size`` ranks get them, and the
    state after them."""
    loaders = [
        _loader(corpora, rank, world_size, num_workers, micro_batch_size)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    rounds, rest = divmod(num_sequences, world_size * micro_batch_size)
    assert rest == 0
    rows = [[row for _ in range(rounds) for row in next(loader)] for loader in loaders]
    merged = merge([loader.state_dict() for loader in reversed(loaders)])
    for loader in loaders:
        loader.close()
    in_order = [rows[i % world_size][i // world_size] for i in range(num_sequences)]
    return in_order, json.loads(json.dumps(merged))


@slow
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=4
    )
)
def test_any_ranks_in_any_order_read_the_same_stream(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("corpora")
    corpora = (_corpus(folder, "a", 300, 0.7), _corpus(folder, "b", 40, 0.3))
    state, sequences = None, []
    for world_size, rounds, micro_batch_size in runs:
        count = world_size * micro_batch_size * rounds
        rows, state = _train(corpora, state, world_size, count, micro_batch_size=micro_batch_size)
        sequences += rows
    expected, at_once = _train(corpora, None, 1, len(sequences))
    assert all(torch.equal(a, b) for a, b in zip(sequences, expected, strict=True))
    assert state == at_once


def test_ranks_and_workers_change_in_the_middle_of_documents_and_across_epochs(tmp_path):
    """1 → 3 → 2 → 4 ranks, 0 to 3 workers; each of two epochs' documents comes once."""
    corpus = _corpus(tmp_path)
    num_tokens = _tokens_of_an_epoch(corpus)
    part = -(-num_tokens // LENGTH // 24) * 12  # half an epoch
    state, sequences = None, []
    for world_size, num_workers in ((1, 2), (3, 0), (2, 1), (4, 0), (1, 3)):
        rows, state = _train((corpus,), state, world_size, part, num_workers)
        sequences += rows
    assert state["number"] == 5 * part
    expected, _ = _train((corpus,), None, 1, 5 * part)
    assert all(torch.equal(a, b) for a, b in zip(sequences, expected, strict=True))
    _assert_lossless(corpus, sequences, state["num_lanes"])


def _tokens_of_an_epoch(corpus):
    stream = documents(LaneConfig(corpus.train, 0, 1, 3), BlockCache(), Cursor())
    return sum(len(next(stream).content) + 1 for _ in range(600))


def _assert_lossless(corpus, rows, num_lanes):
    """Lane by lane, the targets are its documents joined, epoch after epoch; and lanes' documents
    of an epoch are all documents, once."""
    epoch_documents: dict[int, list[str]] = {}
    for lane in range(num_lanes):
        lane_rows = rows[lane::num_lanes]
        targets = [int(lane_rows[0][0])] + [int(token) for row in lane_rows for token in row[1:]]
        expected = []
        for document in documents(
            LaneConfig(corpus.train, lane, num_lanes, 3), BlockCache(), Cursor()
        ):
            if len(expected) >= len(targets):
                break
            expected += [*document.content.encode(), TOKENIZER.eot_id]
            epoch_documents.setdefault(document.start.epoch, []).append(document.content)
        assert targets == expected[: len(targets)]
    for epoch in (0, 1):
        assert len(set(epoch_documents[epoch])) == len(epoch_documents[epoch]) == 600


def test_a_rank_whose_position_was_not_saved_is_noticed(tmp_path):
    corpora = (_corpus(tmp_path),)
    loaders = [_loader(corpora, rank, 3) for rank in range(3)]
    for loader in loaders:
        for _ in range(30):
            next(loader)
    states = [loader.state_dict() for loader in loaders]
    assert merge(states)["number"] == 90
    with pytest.raises(ValueError, match=r"lane .* is missing: the position of one rank"):
        merge([states[0], states[2]])
    next(loaders[0])
    with pytest.raises(ValueError, match="belong to different steps"):
        merge([loader.state_dict() for loader in loaders])


@pytest.mark.parametrize("world_size", [1, 2, 5, 8, 20, 48, 64, 96])
def test_every_number_is_one_ranks(world_size, tmp_path, monkeypatch):
    jobs, corpora = [], (_corpus(tmp_path, "a", 32 * NUM_LANES),)
    monkeypatch.setattr("sparsellm.data.loader.make", lambda job, _: jobs.append(job) or iter(()))
    for rank in range(world_size):
        loader = _loader(corpora, rank, world_size)
        loader.go_back(loader.position._replace(number=7))
        loader.start()
    numbers_of_ranks = []
    for job in jobs:
        lanes = list(job.lanes)
        assert len(lanes) == NUM_LANES // math.gcd(world_size, NUM_LANES)
        numbers = [job.first + i * job.world_size for i in range(100)]
        assert [number % NUM_LANES for number in numbers] == [*lanes * 100][:100]
        numbers_of_ranks += numbers[:10]
    assert sorted(numbers_of_ranks) == list(range(7, 7 + 10 * world_size))


@pytest.mark.parametrize(
    ("documents", "lanes"),
    [(1, 1), (63, 1), (64, 2), (95, 2), (96, 3), (32 * 48 - 1, 24), (32 * 48, 48), (4000, 48)],
)
def test_a_lane_has_at_least_32_documents(tmp_path, documents, lanes):
    loader = _loader((_corpus(tmp_path, "a", 4000), _corpus(tmp_path, "b", documents)))
    assert loader.state_dict()["num_lanes"] == lanes


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    begin=st.integers(0, 2**40),
    count=st.integers(1, 3000),
)
def test_every_stretch_has_the_corpora_in_proportion(weights, seed, begin, count):
    corpora = tuple(Corpus(str(i), (), (), weight) for i, weight in enumerate(weights))
    picks = Picks(corpora, seed)
    counts = picks.counts(begin, begin + count)
    one_by_one = [picks.corpus(number) for number in range(begin, begin + min(count, 50))]
    assert (
        picks.counts(begin, begin + len(one_by_one))
        == np.bincount(one_by_one, minlength=len(weights)).tolist()
    )
    for share, in_stretch in zip(np.array(weights) / sum(weights), counts, strict=True):
        assert abs(in_stretch - share * count) < 3 + 2 * math.log2(count)


@pytest.mark.parametrize(("files", "rows", "group"), [(7, 500, 40), (5, 400, 7), (3, 1000, 24)])
def test_every_lane_has_about_as_many_documents(tmp_path, files, rows, group):
    texts = pa.table({"text": ["one"] * rows})
    for file in range(files):
        pq.write_table(texts, tmp_path / f"{file}.parquet", row_group_size=group)
    shards = tuple(to_shard(str(tmp_path / f"{file}.parquet"), "text") for file in range(files))
    blocks, counts = BlockCache(), []
    for lane in range(NUM_LANES):
        stream = documents(LaneConfig(shards, lane, NUM_LANES, seed=0), blocks, Cursor())
        first_epoch = itertools.takewhile(lambda document: document.start.epoch == 0, stream)
        counts.append(sum(1 for _ in first_epoch))
    mean = files * rows / NUM_LANES
    assert sum(counts) == files * rows
    assert sum(max(count - mean, 0) for count in counts) < 0.03 * sum(counts)


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3, 0.5, 0.9])
def test_every_lane_has_the_corpora_in_proportion(share):
    corpora = tuple(Corpus(str(i), (), (), weight) for i, weight in enumerate((share, 1 - share)))
    picks = Picks(corpora, seed=0)
    first_N = np.array([picks.corpus(number) == 0 for number in range(48 * 400)])
    for lanes in (n for n in range(1, 49) if NUM_LANES % n == 0):
        read = first_N.reshape(-1, lanes).cumsum(0)
        even = share * np.arange(1, len(read) + 1)[:, None]
        assert np.abs(read - even).max() < 6


def test_tokens_are_counted_by_corpus(tmp_path):
    corpora = (_corpus(tmp_path, "a", 300, 3), _corpus(tmp_path, "b", 100, 1))
    rows, state = _train(corpora, None, 2, 80)
    letters = [bytes(t for t in row.tolist() if t < 256).decode() for row in rows]
    counts = {name: LENGTH * sum(name in text for text in letters) for name in "ab"}
    assert state["tokens"] == counts
    assert counts["a"] + counts["b"] == 80 * LENGTH
    assert abs(counts["b"] - 20 * LENGTH) <= 2 * LENGTH
    _, later = _train(corpora, state, 1, 10)
    assert sum(later["tokens"].values()) == 90 * LENGTH


def test_a_corpus_can_join_and_leave(tmp_path):
    first, second = _corpus(tmp_path, "a", 300), _corpus(tmp_path, "b", 300)
    _, state = _train((first,), None, 1, 30)
    loader = _loader((second, first))
    assert loader.load_state_dict(state) == ["corpus b is new and begins at its beginning"]
    rows = [next(loader)[0] for _ in range(20)]
    assert {"a", "b"} == {t for row in rows for t in map(chr, row.tolist()) if t in "ab"}
    alone = _loader((first,))
    assert alone.load_state_dict(merge([loader.state_dict()])) == ["corpus b is no longer read"]
    [note] = _loader((first, second)).load_state_dict(merge([alone.state_dict()]))
    assert note.startswith("corpus b begins at its beginning again, since its position was not")


def test_a_position_continues_with_the_groups_of_lanes_that_it_was_made_with(tmp_path):
    _corpus(tmp_path, "a", 600)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    for index in range(8):
        (tmp_path / f"{index}.jsonl").write_text("".join(lines[index::8]))
    shards = tuple(to_shard(str(tmp_path / f"{index}.jsonl"), "text") for index in range(8))
    corpus = Corpus("a", shards, ())
    loader = _loader((corpus,))
    num_lanes = loader._config.num_lanes
    assert loader.state_dict()["groups"] == {"a": 2}
    before = StreamConfig((corpus,), LENGTH, 3, num_lanes, fixed_groups=(1,))
    sequences = make(Job(before, "bytes", 0, 1, dict.fromkeys(range(num_lanes))), TOKENIZER)
    expected = [next(sequences) for _ in range(60)]
    lanes = {m.lane.number % num_lanes: m.lane for m in expected[:30]}
    saved = loader.state_dict(loader.position._replace(number=30, lanes=lanes))
    saved["groups"] = {"a": 1}
    loader.load_state_dict(saved)
    for m in expected[30:]:
        assert np.array_equal(next(loader)[0], m.tokens_T1)
    assert loader.state_dict()["groups"] == {"a": 1}


def test_an_older_position_continues_with_its_division_of_small_blocks(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"<{i}>" for i in range(2000)]}), path, row_group_size=7)
    corpus = Corpus("a", (to_shard(str(path), "text"),), ())
    before = StreamConfig((corpus,), LENGTH, 3, spread_small_blocks=False)
    sequences = make(Job(before, "bytes", 0, 1, dict.fromkeys(range(NUM_LANES))), TOKENIZER)
    expected = [next(sequences) for _ in range(300)]
    lanes = {m.lane.number % NUM_LANES: m.lane for m in expected[:150]}
    loader = _loader((corpus,))
    saved = loader.state_dict(loader.position._replace(number=150, lanes=lanes))
    del saved["spread_small_blocks"]
    for _ in range(2):  # what it saves then says so, too
        loader.load_state_dict(saved)
        for m in expected[150:]:
            assert np.array_equal(next(loader)[0], m.tokens_T1)
        saved["spread_small_blocks"] = loader.state_dict()["spread_small_blocks"]


def test_lanes_go_on_from_their_own_sequence_however_far_the_rank_is(tmp_path):
    """Where ranks share lanes, each makes and throws away what is the others'."""
    config = StreamConfig((_corpus(tmp_path),), LENGTH, seed=3, num_lanes=4)
    whole = make(Job(config, "bytes", 0, 1, dict.fromkeys(range(4))), TOKENIZER)
    sequences = [next(whole) for _ in range(60)]
    lanes: dict[int, LaneState] = {m.lane.number % 4: m.lane for m in sequences[:8]}
    share = make(Job(config, "bytes", 20, 3, lanes), TOKENIZER)
    for expected in sequences[20::3]:
        sequence = next(share)
        assert sequence.lane == expected.lane
        assert np.array_equal(sequence.tokens_T1, expected.tokens_T1)
