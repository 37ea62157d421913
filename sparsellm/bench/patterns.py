"""Activation patterns for the kernel benchmarks, and inputs whose gate has exactly that pattern.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.types import BLOCK_TOKENS

_STEPS = 64  # σ of `_gaussian_integers`


def representative_window(count_M: Tensor, m: int) -> slice:
    """The window of ``m`` tokens, at a multiple of ``m``, closest to all tokens in mean non-zeros.

    A multiple of the context length gives whole sequences.
    """
    means = count_M[: len(count_M) // m * m].view(-1, m).double().mean(1)
    start = int((means - count_M.double().mean()).abs().argmin()) * m
    return slice(start, start + m)


def describe(x_MK: Tensor, w_NK: Tensor) -> tuple[float, float]:
    """Mean non-zeros per token of ``relu(x Wᵀ)``, and mean union of 64 neighbouring tokens."""
    nnz, union, weight = 0, 0, w_NK.float().t()
    for chunk in x_MK.split(64 * BLOCK_TOKENS):
        active = chunk.float() @ weight > 0
        nnz += int(active.sum())
        padded = F.pad(active, (0, 0, 0, -len(active) % BLOCK_TOKENS))
        union += int(padded.view(-1, BLOCK_TOKENS, active.shape[1]).any(1).sum())
    return nnz / len(x_MK), union / -(-len(x_MK) // BLOCK_TOKENS)


def threshold_gate(
    pattern: str, m: int, k: int, n: int, *, nnz: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and gate weights, bf16, such that ``x Wᵀ`` has ``nnz`` positive entries per row.

    Nothing is learned: both are Gaussian, and four of the K columns subtract a threshold from every
    entry. ``uniform`` has one threshold for all, so that tokens share neurons only by chance.
    ``skewed`` has one threshold per neuron and one per token, which makes rates as unequal as in
    trained models: see `_skewed_thresholds`.

    All entries are integers times one power of two, and so small that fp32 represents every partial
    sum exactly: the order of summation cannot change the pattern.

    Returns:
        x of (M, K), about N(0, 1), and W of (N, K), about N(0, 1 / K), on the generator's device.
    """
    device, free = generator.device, k - 4
    x, w = (_gaussian_integers(rows, k, generator) for rows in (m, n))
    x[:, free:] = w[:, free:] = 0
    sigma = _STEPS**2 * free**0.5
    excess_MN = x @ w.t()  # integers
    neuron_N, token_M = torch.zeros(n, device=device), torch.zeros(m, device=device)
    if pattern == "skewed":
        neuron_N, token_M = _skewed_thresholds(m, n, nnz, generator)
        neuron_N, token_M = neuron_N * sigma, token_M * sigma
        excess_MN -= neuron_N + token_M[:, None]
    low, high = float(excess_MN.min()), float(excess_MN.max())
    for _ in range(40):
        shift = (low + high) / 2
        low, high = (shift, high) if int((excess_MN > shift).sum()) > m * nnz else (low, shift)
    # A threshold is 32 (256 high + low), so that the product of two columns is exact.
    x[:, -1], x[:, -2] = 512, 32
    w[:, -1], w[:, -2] = _two_digits(neuron_N + shift)
    w[:, -3], w[:, -4] = 512, 32
    x[:, -3], x[:, -4] = _two_digits(token_M)
    root_k = 2 ** round(math.log2(k) / 2)
    return (x / _STEPS).bfloat16(), (w / (_STEPS * root_k)).bfloat16()


def _gaussian_integers(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rounded Gaussian of σ `_STEPS`: nearly as many significant bits as bf16 has."""
    values = torch.randn(rows, columns, generator=generator, device=generator.device)
    return (values * _STEPS).round().clamp(-255, 255)


def _two_digits(threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of 512 and of 32 that subtract a threshold, both exact in bf16."""
    units = (threshold / 32).round().clamp(-65_536, 65_535)
    high = (units / 256).floor()
    return -16 * high, 256 * high - units


def _skewed_thresholds(
    m: int, n: int, nnz: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Thresholds per neuron (N,) and per token (M,), whose sum a standard Gaussian must exceed.

    A token's rate is log-normal (σ 1, so the 99th percentile is about six times the mean); a
    neuron's falls with its rank as 1 / (rank + 50), so that 256 of 5,632 carry a third.
    """
    device = generator.device
    rate_M = torch.randn(m, generator=generator, device=device).exp()
    rate_M = (rate_M * (nnz / rate_M.mean())).clamp(max=0.9 * n)
    weight_N = 1.0 / (torch.randperm(n, generator=generator, device=device) + 50.0)
    # Rates are clipped at 0.9; the scale is chosen so that the mean is right nevertheless.
    low, high = 0.0, n / float(weight_N.min())
    for _ in range(60):
        scale = (low + high) / 2
        mean = (weight_N * scale).clamp(max=0.9).sum()
        low, high = (scale, high) if mean < nnz else (low, scale)
    alone_N = -torch.special.ndtri((weight_N * scale).clamp(max=0.9))
    neuron_N, grid = alone_N, torch.linspace(5, -5, 501, device=device)
    for _ in range(3):
        # Non-zeros per row, rising along the grid; a token takes the place that gives its rate.
        rates = torch.special.ndtr(-grid[:, None] - neuron_N).sum(1)
        token_M = grid[torch.searchsorted(rates, rate_M).clamp(max=len(grid) - 1)]
        # Over all tokens, varying thresholds widen the Gaussian.
        neuron_N = alone_N * (1 + token_M.var(correction=0)).sqrt()
    return neuron_N, token_M


def fit_gate(pattern_MN: Tensor, k: int, *, max_steps: int = 2000) -> tuple[Tensor, Tensor]:
    """Inputs and gate weights, bf16, such that ``x Wᵀ`` is positive exactly where the pattern is.

    Both are learned with a squared hinge loss, for which TF32 suffices; sparse patterns are far
    below the capacity of a rank-K product. Every entry ends up at least 0.2 from zero, so that
    neither the order of summation nor the precision of the accumulator changes the pattern.

    Returns:
        x of (M, K) and W of (N, K).

    Raises:
        ValueError: the pattern is not met after ``max_steps`` of Adam; it is too dense for K.
    """
    n = pattern_MN.shape[1]
    generator = torch.Generator(pattern_MN.device).manual_seed(0)
    sign_MN = pattern_MN.float() * 2 - 1
    w = torch.randn(n, k, generator=generator, device=pattern_MN.device) / k**0.5
    # A token starts as the sum of its neurons' weights, whose products with it are then positive,
    # plus a constant that makes those of the other neurons negative.
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
        f"entries wrong after {max_steps} steps); use a sparser pattern or a larger hidden_size"
    )
