"""Patterns of the kernel benchmarks."""

import pytest
import torch

from sparsellm.analyze.trace import load_traces
from sparsellm.bench.patterns import describe, fit_gate, representative_window, threshold_gate


@pytest.mark.parametrize("pattern", ["uniform", "skewed"])
@pytest.mark.parametrize(("m", "k", "n"), [(256, 64, 2816), (1, 64, 2816), (64, 256, 1024)])
@pytest.mark.parametrize("nnz", [15, 60, 300, "half"])
def test_synthetic_gates_have_the_mean_asked_for_in_any_precision(pattern, m, k, n, nnz):
    nnz = n // 2 if nnz == "half" else nnz
    generator = torch.Generator().manual_seed(1)
    x, w = threshold_gate(pattern, m, k, n, nnz=nnz, generator=generator)
    assert (x.shape, w.shape) == ((m, k), (n, k))
    assert x.dtype == w.dtype == torch.bfloat16
    product = x.double() @ w.double().t()
    active = product > 0
    assert active.sum(1).double().mean() == pytest.approx(nnz, rel=0.02)
    # fp32 holds every partial sum: any order of summation gives these bits.
    assert torch.equal((x.float() @ w.float().t()).double(), product)
    half = k // 2
    parts = [x[:, s].float() @ w[:, s].float().t() for s in (slice(half, k), slice(half))]
    assert torch.equal((parts[0] + parts[1]).double(), product)


@pytest.mark.parametrize("nnz", [30, 120])
def test_skewed_gates_are_like_a_trained_model_and_uniform_ones_are_not(nnz):
    figures = {}
    for pattern in ("uniform", "skewed"):
        generator = torch.Generator().manual_seed(1)
        x, w = threshold_gate(pattern, 512, 128, 5632, nnz=nnz, generator=generator)
        active = x.float() @ w.float().t() > 0
        count = active.sum(1).float()
        counts = active.sum(0).sort(descending=True).values
        hot = float(counts[:256].sum() / counts.sum())
        figures[pattern] = (hot, float(count.quantile(0.99) / nnz), describe(x, w))
        mean, union = figures[pattern][2]
        assert mean == pytest.approx(float(count.mean()))
        assert union == float(active.view(8, 64, -1).any(1).sum(1).float().mean())
    hot, heavy, (_, union) = figures["skewed"]
    assert 0.25 < hot < 0.5  # a real model: 33 to 50%
    assert heavy > 3
    assert figures["uniform"][0] < 0.15
    assert figures["uniform"][2][1] > 1.2 * union


def test_describe_takes_a_last_block_of_fewer_tokens():
    x = torch.tensor([[1.0], [-1.0]]).repeat(33, 1)[:65].bfloat16()  # 65 tokens
    w = torch.tensor([[1.0], [1.0], [-1.0]]).bfloat16()
    mean, union = describe(x, w)
    assert mean == pytest.approx((33 * 2 + 32) / 65)
    assert union == (3 + 2) / 2


def test_a_window_is_like_the_whole():
    count = torch.tensor([9, 9, 1, 3, 2, 8, 0, 0, 4])  # mean 4
    assert representative_window(count, 2) == slice(4, 6)
    assert representative_window(count, 9) == slice(0, 9)
    assert representative_window(count, 1) == slice(8, 9)


def test_a_traces_pattern_is_where_it_fired(test_data):
    traces, _ = load_traces(test_data / "traces" / "pilot_nnz16-44.npz", 5632)
    trace, pattern = traces[1], traces[1].pattern()
    assert pattern.sum(1).tolist() == trace.count_M.tolist()
    assert pattern.nonzero()[:, 1].tolist() == trace.index.tolist()


def test_a_gate_reproduces_a_real_pattern_exactly(test_data):
    traces, _ = load_traces(test_data / "traces" / "pilot_nnz16-44.npz", 5632)
    # As many tokens to a dimension as in the benchmark (16,384 to 2,048), the heavy ones with them.
    pattern = traces[5].pattern()[:256, :1408]
    x, w = fit_gate(pattern, k=32)
    assert x.dtype == w.dtype == torch.bfloat16
    assert torch.equal(x.double() @ w.double().t() > 0, pattern)
    assert torch.equal(x.float() @ w.float().t() > 0, pattern)


def test_an_impossible_pattern_is_said_to_be():
    pattern = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.raises(ValueError, match="use a sparser pattern or a larger hidden_size"):
        fit_gate(pattern, k=8, max_steps=50)
