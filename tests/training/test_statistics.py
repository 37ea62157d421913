"""Statistics against plain numpy on the same activations, however they are split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsellm.runs.records import nnz_bucket_edges, num_position_buckets, position_bucket_starts
from sparsellm.training.statistics import SparsityStats

L, B, T, N = 3, 4, 16, 24


def _alone(tensor: torch.Tensor) -> None:
    """A world of one rank."""


def _stats(window_tokens: int = 10**9) -> SparsityStats:
    return SparsityStats(L, N, T, window_tokens, torch.device("cpu"))


def _active(seed: int, density: float, batch: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(L, batch, T, N, generator=generator) < density


def _feed(stats: SparsityStats, active_LBTN: torch.Tensor) -> None:
    stats.update(active_LBTN.sum(-1, dtype=torch.int32), active_LBTN.sum((1, 2), dtype=torch.int32))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), density=st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_summary_equals_numpy(seed, density):
    active = _active(seed, density)
    stats = _stats()
    _feed(stats, active)
    stats.finish_step(_alone)
    summary = stats.summary().read()
    nnz = active.sum(-1).flatten(1).numpy()
    np.testing.assert_allclose(summary.nnz_mean, nnz.mean(1))
    np.testing.assert_array_equal(summary.nnz_max, nnz.max(1))
    for percent, found in ((50, summary.nnz_p50), (99, summary.nnz_p99)):
        expected = np.percentile(nnz, percent, axis=1, method="inverted_cdf")
        np.testing.assert_array_equal(found, expected)
    edges = nnz_bucket_edges(N)
    np.testing.assert_array_equal(summary.nnz_histogram, np.histogram(nnz, bins=[*edges, N + 1])[0])
    for bucket, start in enumerate(position_bucket_starts(T)):
        stop = [*position_bucket_starts(T), T][bucket + 1]
        expected = active[:, :, start:stop].sum(-1).double().mean((1, 2))
        np.testing.assert_allclose(
            [layer[bucket] for layer in summary.nnz_by_position], expected, atol=1e-12
        )


def test_split_into_micro_batches_and_ranks_changes_nothing():
    active = _active(seed=1, density=0.1)
    whole = _stats(window_tokens=B * T)
    _feed(whole, active)
    whole.finish_step(_alone)
    expected = whole.summary().read()

    ranks = [_stats(window_tokens=B * T) for _ in range(2)]
    for rank, stats in enumerate(ranks):
        for sequence in range(B // 2):
            _feed(stats, active[:, [2 * sequence + rank]])
    counters = []  # what an all-reduce would sum: collected first, then given to both
    for stats in ranks:
        state = [stats._histogram_LC, stats._fired_LN]
        state += [stats._position_nnz_LP, stats._position_tokens_P]
        counters.append(torch.cat([c.flatten() for c in state]))
    total = counters[0] + counters[1]
    for stats in ranks:
        stats.finish_step(lambda flat: flat.copy_(total))
        summary = stats.summary().read()
        assert summary == expected
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(stats.state_dict()[name], value)


def test_dead_is_silence_for_the_whole_window_and_ends_with_one_activation():
    stats = _stats(window_tokens=2 * B * T)
    quiet = torch.zeros(L, B, T, N, dtype=torch.bool)
    loud = quiet.clone()
    loud[1, 2, 3, 4] = True
    for expected_dead, active in (
        (0, quiet),
        (L * N, quiet),
        (L * N - 1, loud),
        (L * N - 1, quiet),
    ):
        _feed(stats, active)
        stats.finish_step(_alone)
        assert int(stats.dead_LN().sum()) == expected_dead
    assert not stats.dead_LN()[1, 4]
    _feed(stats, quiet)
    stats.finish_step(_alone)
    assert stats.dead_LN()[1, 4]


def test_activity_is_that_of_the_last_complete_window():
    stats = _stats(window_tokens=2 * B * T)
    first, second, third = (_active(seed, 0.2) for seed in range(3))
    for active in (first, second, third):
        _feed(stats, active)
        stats.finish_step(_alone)
    torch.testing.assert_close(stats.activity_LN, (first.long() + second).sum((1, 2)))
    assert int(stats.activity_tokens) == 2 * B * T
    torch.testing.assert_close(stats.window_fired_LN, third.long().sum((1, 2)))


def test_state_restores_exactly():
    stats = _stats(window_tokens=3 * B * T)
    for seed in range(4):
        _feed(stats, _active(seed, 0.01))
        stats.finish_step(_alone)
    restored = _stats(window_tokens=3 * B * T)
    restored.load_state_dict(stats.state_dict())
    for each in (stats, restored):
        _feed(each, _active(9, 0.01))
        each.finish_step(_alone)
    for name, value in stats.state_dict().items():
        torch.testing.assert_close(restored.state_dict()[name], value)


@pytest.mark.parametrize(
    ("context_length", "starts"),
    [
        (1, [0]),
        (2, [0, 1]),
        (3, [0, 1, 2]),
        (4, [0, 1, 2]),
        (5, [0, 1, 2, 4]),
        (16, [0, 1, 2, 4, 8]),
    ],
)
def test_position_buckets_are_powers_of_two(context_length, starts):
    assert position_bucket_starts(context_length) == starts
    assert num_position_buckets(context_length) == len(starts)


@pytest.mark.parametrize("n", [1, 5, 8, 9, 64, 352, 5632, 13_824])
def test_histogram_edges_rise_and_end_at_the_width(n):
    edges = nnz_bucket_edges(n)
    assert edges[0] == 0
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert edges[-1] == n
