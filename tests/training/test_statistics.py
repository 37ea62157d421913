"""Statistics against plain numpy on the same activations, however they are split."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import TINY, train_recipe
from hypothesis import given, settings, strategies as st

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.paths import REFERENCE_VARIABLE
from sparsellm.recipe import load_recipe
from sparsellm.report.collect import read_runs
from sparsellm.report.series import run_series
from sparsellm.runs.telemetry.dashboard import wandb_values
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, Counter, LayerMetric, Metric
from sparsellm.runs.telemetry.records import (
    KernelStats,
    TrainRecord,
    nnz_bucket_edges,
    position_bucket_starts,
    read_lines,
    read_metrics,
)
from sparsellm.sparsity.counts import NeuronActivity
from sparsellm.training.counting import counters as counters_module
from sparsellm.training.counting.counters import Counters, SkippedSteps
from sparsellm.training.counting.layout import CounterLayout
from sparsellm.training.objective import LossSums

L, B, T, N = 3, 8, 16, 24  # over 100 tokens: p99 is not the largest
L1_L, UNION_L = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([5, 9, 7])  # of each micro-batch
CPU = torch.device("cpu")
SHAPE = [f"model.num_hidden_layers={L}", f"model.intermediate_size={N}"]
SHAPE += [f"model.context_length={T}", f"train.global_batch_tokens={B * T}"]
NO_LIMITS = SkippedSteps().limits(None)
TAKEN, REFUSED = torch.tensor(0.0), torch.tensor(1.0)


def _active(seed: int, density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(L, B, T, N, generator=generator) < density


def _counted(*micro_batches: torch.Tensor) -> Counters:
    """The counters of a step in which these neurons are active, (L, B, T, N) bool."""
    layout = CounterLayout(load_recipe("debug", [*TINY, *SHAPE]), CPU)
    ffns = [SparseFFN(8, N, gated=True) for _ in range(L)]
    counters = Counters(layout, ffns, micro_batches[0][0, ..., 0].numel(), len(micro_batches))
    for active_LBTN in micro_batches:
        counters.add(
            LossSums(
                cross_entropy_sum=torch.tensor(1.5),
                l1_sum_L=L1_L,
                nnz_LBT=active_LBTN.sum(-1, dtype=torch.int32),
                active_LN=active_LBTN.sum((1, 2), dtype=torch.int32),
                union_L=UNION_L,
            )
        )
    return counters


def _reading(counters: Counters, dead_LN: torch.Tensor):
    assert not counters.reduce(torch.tensor(1.0), NO_LIMITS, stop=False, failed=False)
    counters.send(dead_LN)
    return counters.read()


def _feed(stats: NeuronActivity, active_LBTN: torch.Tensor, refused: torch.Tensor = TAKEN) -> None:
    stats.advance(_counted(active_LBTN).active_LN, B * T, refused)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), density=st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_a_reading_equals_numpy(seed, density):
    active = _active(seed, density)
    dead_LN = ~active.any(2).any(1)
    reading = _reading(_counted(active), dead_LN)
    assert reading.metrics == {"loss": 1.5 / (B * T), "l1": pytest.approx(7 / (B * T * L))}
    assert reading.gradient_norm == 1.0
    assert reading.kernels == KernelStats([False] * L, [2.5, 4.5, 3.5], 0)  # two blocks of tokens
    assert reading.largest_union_L == UNION_L.tolist()
    assert not reading.stop
    statistics = reading.sparsity
    nnz = active.sum(-1).flatten(1).numpy()
    np.testing.assert_allclose(statistics.nnz_mean, nnz.mean(1))
    np.testing.assert_allclose(reading.nnz_L, nnz.mean(1))
    np.testing.assert_array_equal(statistics.nnz_max, nnz.max(1))
    for percent, values in ((50, statistics.nnz_p50), (99, statistics.nnz_p99)):
        expected = np.percentile(nnz, percent, axis=1, method="inverted_cdf")
        np.testing.assert_array_equal(values, expected)
    np.testing.assert_allclose(statistics.dead_fraction, dead_LN.numpy().mean(1))
    edges = nnz_bucket_edges(N)
    np.testing.assert_array_equal(
        statistics.nnz_histogram, np.histogram(nnz, bins=[*edges, N + 1])[0]
    )
    for bucket, start in enumerate(position_bucket_starts(T)):
        stop = [*position_bucket_starts(T), T][bucket + 1]
        expected = active[:, :, start:stop].sum(-1).double().mean((1, 2))
        np.testing.assert_allclose(
            [layer[bucket] for layer in statistics.nnz_by_position], expected, atol=1e-12
        )


def test_split_into_micro_batches_and_ranks_changes_nothing(monkeypatch):
    active = _active(seed=1, density=0.1)
    none_dead = torch.zeros(L, N, dtype=torch.bool)
    expected = _reading(_counted(active), none_dead)
    ranks = [_counted(active[:, i : i + 2], active[:, i + 4 : i + 6]) for i in (0, 2)]
    rank_counters = []  # what an all-reduce would sum: collected first, then given to both
    monkeypatch.setattr(counters_module, "all_reduce_sum", rank_counters.append)
    for counters in ranks:
        counters.reduce(torch.tensor(1.0), NO_LIMITS, stop=False, failed=False)
    total = rank_counters[0] + rank_counters[1]
    for values, counters in zip(rank_counters, ranks, strict=True):
        values.copy_(total)
        counters.send(none_dead)
        assert counters.read().sparsity == expected.sparsity
        assert counters.read().nnz_L == expected.nnz_L
        # Each micro-batch has the same sums, and there are four of them.
        assert counters.read().metrics == {k: 4 * v for k, v in expected.metrics.items()}
        assert torch.equal(counters.active_LN, active.sum((1, 2)).double())


def test_passes_over_the_text_are_means_over_the_sequences_of_all_ranks(monkeypatch):
    layout = CounterLayout(load_recipe("debug", [*TINY, *SHAPE]), CPU, num_corpora=3)
    ffns = [SparseFFN(8, N, gated=True) for _ in range(L)]
    ranks = [Counters(layout, ffns, B * T, 2) for _ in range(2)]
    rank_counters = []
    monkeypatch.setattr(counters_module, "all_reduce_sum", rank_counters.append)
    texts_R2C = np.array([[[3, 1, 0], [0, 2, 0]], [[1, 3, 0], [1, 9, 0]]])
    for counters, texts_2C in zip(ranks, texts_R2C, strict=True):
        norm = torch.tensor(1.0)
        counters.reduce(norm, NO_LIMITS, stop=False, failed=False, texts_2C=texts_2C)
    rank_counters[0].add_(rank_counters[1])
    ranks[0].send(None)
    reading = ranks[0].read()
    assert reading.epochs_C == [1 / 4, 11 / 4, 0]
    assert not reading.failed


@pytest.fixture
def further_counters():
    """Three counters, one entry each."""
    nnz = Counter(lambda sums: sums.nnz_LBT.sum(), "per_token_and_layer")
    tokens = Counter(lambda sums: (sums.nnz_LBT[0] >= 0).sum())
    nnz_L = Counter(lambda sums: sums.nnz_LBT.sum((1, 2)), "per_token")
    METRICS.append(Metric("counted_nnz", "Active neurons", "neurons per token", counter=nnz))
    METRICS.append(Metric("counted_tokens", "Tokens", "tokens", counter=tokens))
    LAYER_METRICS.append(LayerMetric("counted_nnz", "Active neurons by layer", counter=nnz_L))
    yield
    del METRICS[-2:], LAYER_METRICS[-1:]


@pytest.mark.usefixtures("further_counters")
def test_a_counter_is_one_entry(tiny):
    """By which it is counted in each of several micro-batches, logged, and sent to wandb."""
    recipe = tiny("train.steps=2", "ffn.kernels=dense")
    train_recipe(recipe)
    lines = read_metrics(recipe.run_path, "train")
    assert len(lines) == 2
    for line in lines:
        nnz_L = line["sparsity"]["nnz_mean"]
        assert sum(nnz_L) > 0
        assert line["counted_tokens"] == recipe.train.global_batch_tokens
        assert line["counted_nnz"] == pytest.approx(sum(nnz_L) / len(nnz_L))
        assert line["layers"] == {"counted_nnz": pytest.approx(nnz_L)}
    records = [record for _, record in read_lines(recipe.run_path / "metrics.jsonl")]
    sent = wandb_values(next(r for r in records if isinstance(r, TrainRecord)), recipe)
    assert sent["train/counted_tokens"] == recipe.train.global_batch_tokens
    assert sent["layers/counted_nnz/01"] == lines[0]["layers"]["counted_nnz"][1]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.1])
@pytest.mark.parametrize("spoilt", ["loss", "l1", "gradient norm", None])
def test_a_step_over_its_limits_is_refused(spoilt, value):
    counters = _counted(_active(seed=2, density=0.1))
    if spoilt == "loss":
        counters._cross_entropy.fill_(value * B * T)
    if spoilt == "l1":
        counters._l1.fill_(value)
    norm = torch.tensor(value if spoilt == "gradient norm" else 2.9)
    limits = {"loss": 3.0, "gradient norm": 3.0}
    refused = counters.reduce(norm, limits, stop=False, failed=False)
    finite = spoilt is None or (spoilt == "l1" and math.isfinite(value))
    assert bool(refused) == (not finite)
    counters.send(torch.ones(L, N, dtype=torch.bool))
    reading = counters.read()
    assert reading.refused == bool(refused)
    assert (reading.sparsity is None) == bool(refused)
    assert not reading.failed
    assert counters.reduce(torch.tensor(1.0), NO_LIMITS, stop=False, failed=True)  # no data
    counters.send(None)
    assert counters.read().failed


@pytest.mark.parametrize("l1", [0, 0.01])
@pytest.mark.parametrize("ffn", [("silu", "dense"), ("relu", "dense"), ("relu", "sparse")])
def test_l1_is_computed_where_the_loss_has_it(tiny, ffn, l1, monkeypatch, capsys):
    monkeypatch.setenv(REFERENCE_VARIABLE, "1")
    activation, kernels = ffn
    recipe = tiny(
        *(f"sparsity.l1_coefficient={l1}", f"ffn.activation={activation}"),
        *(f"ffn.kernels={kernels}", "runtime.precision=bf16", "train.steps=1"),
    )
    train_recipe(recipe)
    records = [record for _, record in read_lines(recipe.run_path / "metrics.jsonl")]
    [record] = [r for r in records if isinstance(r, TrainRecord)]
    assert (record.values["l1"] > 0) == (l1 > 0)
    assert ("| l1 " in capsys.readouterr().out) == (l1 > 0)
    [run] = read_runs([recipe.run_path])
    assert len(run_series(run)["lines"]["l1"]["x"]) == (1 if l1 else 0)  # a log scale has no zero
    is_whole = set(record.sparsity.nnz_mean) == {recipe.model.intermediate_size}
    assert is_whole == (activation == "silu")


def test_sums_of_integers_are_exact_where_fp32_is_not():
    counters = _counted(_active(seed=3, density=0.5))
    counters._at.union_L.fill_(2**24)
    counters.active_LN.fill_(2**40)
    counters.add(
        LossSums(
            torch.tensor(0.0),
            torch.zeros(L),
            torch.ones(L, B, T, dtype=torch.int32),
            torch.ones(L, N, dtype=torch.int32),
            torch.ones(L, dtype=torch.int64),
        )
    )
    assert counters._at.union_L.tolist() == [2**24 + 1] * L
    assert (counters.active_LN == 2**40 + 1).all()


def test_dead_is_silence_for_the_whole_window_and_ends_with_one_activation():
    stats = NeuronActivity(L, N, 2 * B * T, CPU)
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
        assert int(stats.dead_LN().sum()) == expected_dead
    assert not stats.dead_LN()[1, 4]
    _feed(stats, quiet, REFUSED)
    assert not stats.dead_LN()[1, 4]
    _feed(stats, quiet)
    assert stats.dead_LN()[1, 4]


def test_activity_is_that_of_the_last_complete_window():
    stats = NeuronActivity(L, N, 2 * B * T, CPU)
    first, second, third = (_active(seed, 0.2) for seed in range(3))
    for active in (first, second, third):
        _feed(stats, active)
        _feed(stats, active, REFUSED)
    torch.testing.assert_close(stats.activity_LN, (first.long() + second).sum((1, 2)))
    assert int(stats.activity_tokens) == 2 * B * T
    torch.testing.assert_close(stats.window_fired_LN, third.long().sum((1, 2)))


def test_state_restores_exactly():
    stats = NeuronActivity(L, N, 3 * B * T, CPU)
    for seed in range(4):
        _feed(stats, _active(seed, 0.01))
    restored = NeuronActivity(L, N, 3 * B * T, CPU)
    restored.load_state_dict(stats.state_dict())
    for each in (stats, restored):
        _feed(each, _active(9, 0.01))
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


@pytest.mark.parametrize("n", [1, 5, 8, 9, 64, 352, 5632, 13_824])
def test_histogram_edges_rise_and_end_at_the_width(n):
    edges = nnz_bucket_edges(n)
    assert edges[0] == 0
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert edges[-1] == n
