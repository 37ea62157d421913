"""Columns kept for backward: never too few at first, soon not many more than needed."""

import itertools
import random

from sparsellm.ffn.training_path.capacity import SHRUNK_STEPS, Capacity, size_for

WORST = 128 * 5632


def test_begins_where_nothing_can_overflow_and_stays_until_it_has_seen_enough():
    capacity = Capacity(WORST)
    assert capacity.columns == WORST + 1
    for _ in range(15):
        capacity.observe(50_000)
        assert capacity.columns == WORST + 1
    capacity.observe(WORST)  # the largest lately decides
    assert capacity.columns == WORST + 1
    for _ in range(16):
        capacity.observe(50_000)
    assert capacity.columns == size_for(1.25 * 50_000) == 71_680


def test_grows_at_once_after_an_overflow_and_just_before_one():
    for largest, fits in ((100_000, False), (70_000, True)):
        capacity = Capacity(WORST)
        for _ in range(16):
            capacity.observe(50_000)
        assert (largest <= capacity.columns) == fits
        capacity.observe(largest)
        assert capacity.columns == size_for(1.25 * largest)
    capacity.observe(10 * WORST)
    assert capacity.columns == WORST + 1  # more there cannot be


def test_noise_does_not_make_it_go_up_and_down():
    chance, sizes = random.Random(1), []
    capacity = Capacity(WORST)
    for _ in range(2000):
        largest = round(chance.uniform(0.93, 1.07) * 60_000)
        assert largest <= capacity.columns
        capacity.observe(largest)
        sizes.append(capacity.columns)
    changes = [(a, b) for a, b in itertools.pairwise(sizes) if a != b]
    assert len(changes) <= 2


def test_follows_a_collapse_down_to_nothing():
    capacity, union = Capacity(WORST), 0.9 * WORST
    for _ in range(3000):
        union *= 0.99
        assert union <= capacity.columns
        capacity.observe(int(union))
    assert capacity.columns == 1024


def test_a_layer_smaller_than_the_smallest_size():
    capacity = Capacity(96)
    for largest in [96, *[10] * 100, 96]:
        capacity.observe(largest)
        assert capacity.columns == 97


def test_sizes_are_few_multiples_of_1024():
    sizes = sorted({size_for(columns) for columns in range(0, 2_000_000, 1000)})
    assert len(sizes) < 40
    assert all(size % 1024 == 0 for size in sizes)
    assert all(b <= max(1.2 * a + 1024, 2 * 1024) for a, b in itertools.pairwise(sizes))
    assert all(size_for(size) == size for size in sizes)


def test_micro_batches_of_another_size_keep_what_was_learnt():
    capacity = Capacity(100_000)
    assert capacity.scaled(200_000).columns == 200_001  # nothing was learnt yet
    for _ in range(SHRUNK_STEPS):
        capacity.observe(8_000)
    twice = capacity.scaled(200_000)
    assert 2 * 8_000 <= twice.columns < 4 * 8_000
    assert twice.worst == 200_000
    assert capacity.scaled(10).columns == 11
