"""Activation patterns for the kernel benchmarks, and inputs whose gate has exactly that pattern.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsellm.analyze.trace import load_traces


def trace_pattern(path: Path, layer: int, num_neurons: int, device: torch.device) -> Tensor:
    """(M, N) bool: where a recorded layer fired, see `analyze.trace`."""
    trace = load_traces(path, num_neurons)[layer]
    pattern = torch.zeros(trace.num_tokens, num_neurons, dtype=torch.bool, device=device)
    rows = torch.from_numpy(trace.rows).to(device)
    pattern[rows, torch.from_numpy(trace.index.astype(np.int64)).to(device)] = True
    return pattern


def uniform_pattern(m: int, n: int, nnz: float, generator: torch.Generator) -> Tensor:
    """(M, N) bool with ``nnz`` non-zeros a row on average; tokens share nothing but chance."""
    return torch.rand(m, n, generator=generator, device=generator.device) < nnz / n


def skewed_pattern(m: int, n: int, nnz: float, generator: torch.Generator) -> Tensor:
    """(M, N) bool, ``nnz`` a row on average, rows and neurons unequal as in trained models.

    A token's rate is log-normal (σ 1, so the 99th percentile is about six times the mean); a
    neuron's falls with its rank as 1 / (rank + 50), so that 256 of 5,632 carry a third.
    """
    device = generator.device
    rate_M = torch.randn(m, generator=generator, device=device).exp()
    weight_N = 1.0 / (torch.randperm(n, generator=generator, device=device) + 50.0)
    rate_MN = rate_M[:, None] * weight_N
    # Chances stop at 1: the scale is what gives the mean in spite of that.
    low, high = 0.0, n / float(weight_N.min() * rate_M.min())
    for _ in range(60):
        scale = (low + high) / 2
        mean = (rate_MN * scale).clamp(max=1).sum(1).mean()
        low, high = (scale, high) if mean < nnz else (low, scale)
    return torch.rand(m, n, generator=generator, device=device) < rate_MN * scale


def fit_gate(
    pattern_MN: Tensor, k: int, *, seed: int = 0, max_steps: int = 2000
) -> tuple[Tensor, Tensor]:
    """Inputs and gate weights, bf16, such that ``x Wᵀ`` is positive exactly where asked.

    Both are learned with a squared hinge loss; sparse patterns are far below the capacity of a
    rank-K product. Every entry ends up at least 0.2 from zero, so that no order of summation and no
    precision of the accumulator changes the pattern.

    Args:
        pattern_MN: bool.
        k: hidden_size.
        seed: of the beginning.
        max_steps: of Adam.

    Returns:
        x of (M, K) and W of (N, K).

    Raises:
        ValueError: not exact after ``max_steps``: the pattern is too dense for K.
    """
    n = pattern_MN.shape[1]
    generator = torch.Generator(pattern_MN.device).manual_seed(seed)
    sign_MN = pattern_MN.float() * 2 - 1
    w = torch.randn(n, k, generator=generator, device=pattern_MN.device) / k**0.5
    # A token begins as the sum of its neurons, which then agree with it, and a constant that the
    # other neurons can disagree with.
    x = pattern_MN.float() @ w
    x[:, -1], w[:, -1] = 1.0, -0.5
    parameters = [x, w]
    optimizer = torch.optim.Adam(parameters, lr=0.02, betas=(0.9, 0.99), eps=1e-12)
    for _ in range(max_steps):
        x_bf16, w_bf16 = x.bfloat16(), w.bfloat16()
        margin_MN = sign_MN * (x_bf16.float() @ w_bf16.float().t())
        if margin_MN.min() > 0.2:
            return x_bf16, w_bf16
        gradient_MN = sign_MN * (margin_MN - 1).clamp(max=0)
        x.grad, w.grad = gradient_MN @ w_bf16.float(), gradient_MN.t() @ x_bf16.float()
        optimizer.step()
    wrong = int((margin_MN <= 0).sum())
    raise ValueError(
        f"no gate of hidden_size {k} was found for the pattern ({wrong} of {margin_MN.numel():,} "
        f"entries wrong after {max_steps} steps); take a sparser pattern or a larger hidden_size"
    )
