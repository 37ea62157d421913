"""Patterns of the kernel benchmarks."""

from __future__ import annotations

import pytest
import torch

from sparsellm.analyze import statistics
from sparsellm.analyze.trace import load_traces
from sparsellm.bench.patterns import fit_gate, skewed_pattern, trace_pattern, uniform_pattern


@pytest.mark.parametrize("make", [uniform_pattern, skewed_pattern])
@pytest.mark.parametrize("nnz", [15, 60, 300])
def test_synthetic_patterns_have_the_mean_asked_for(make, nnz):
    pattern = make(2048, 5632, nnz, torch.Generator().manual_seed(1))
    count = pattern.sum(1).float()
    assert count.mean() == pytest.approx(nnz, rel=0.05)
    activity = pattern.sum(0).numpy()
    if make is skewed_pattern:
        assert 0.25 < statistics.hot_share(activity, 256) < 0.5  # a real model: 33 to 50%
        assert count.quantile(0.99) > 3 * nnz
    else:
        assert statistics.hot_share(activity, 256) < 0.12


def test_trace_pattern_is_the_trace(test_data):
    path = test_data / "traces" / "pilot_nnz16-44.npz"
    pattern = trace_pattern(path, 1, 5632, torch.device("cpu"))
    trace = load_traces(path, 5632)[1]
    assert pattern.sum(1).tolist() == trace.count_M.tolist()
    assert pattern.nonzero()[:, 1].tolist() == trace.index.tolist()


@pytest.mark.parametrize("layer", [0, 5])
def test_a_gate_reproduces_a_real_pattern_exactly(test_data, layer):
    path = test_data / "traces" / "pilot_nnz16-44.npz"
    # As many tokens to a dimension as in the benchmark (16,384 to 2,048), the heavy ones with them.
    pattern = trace_pattern(path, layer, 5632, torch.device("cpu"))[:256]
    x, w = fit_gate(pattern, k=32)
    assert x.dtype == w.dtype == torch.bfloat16
    assert torch.equal(x.double() @ w.double().t() > 0, pattern)
    assert torch.equal(x.float() @ w.float().t() > 0, pattern)


def test_an_impossible_pattern_is_said_to_be():
    pattern = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.raises(ValueError, match="take a sparser pattern or a larger hidden_size"):
        fit_gate(pattern, k=8, max_steps=50)
