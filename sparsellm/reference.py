"""Every op in plain torch: the specification, the CPU path and the tests' oracle.

Shapes: M tokens, K hidden_size, N intermediate_size. Weights are stored as `nn.Linear` stores
them, (out, in): w_gate_NK, w_up_NK, w_down_KN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu}


class FFNStats(NamedTuple):
    """What an FFN says of its activations. Only `l1_sum` carries a gradient."""

    l1_sum: Tensor  # () fp32, Σ over tokens and units of |h|
    nnz_M: Tensor  # (M,) int32, non-zero gate activations of each token
    fired_N: Tensor  # (N,) int32, tokens on which each neuron's gate was non-zero


def ffn_stats(h_MN: Tensor, gate_MN: Tensor) -> FFNStats:
    """L1 of the hidden activations and the pattern of the gate.

    A neuron counts as active where its *gate* is non-zero: that pattern is what a sparse format
    stores and what decides which columns of W_u and W_d are read.
    """
    active_MN = gate_MN.detach() != 0
    # fp32 keeps the result independent of how the batch is split, to fp32 rounding; float64
    # inputs (tests) stay float64.
    accumulate = torch.promote_types(h_MN.dtype, torch.float32)
    return FFNStats(
        l1_sum=h_MN.abs().sum(dtype=accumulate),
        nnz_M=active_MN.sum(dim=1, dtype=torch.int32),
        fired_N=active_MN.sum(dim=0, dtype=torch.int32),
    )


def gated_ffn(
    x_MK: Tensor,
    w_gate_NK: Tensor,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    activation: str = "relu",
) -> tuple[Tensor, FFNStats]:
    """``y = (act(x W_g) * (x W_u)) W_d`` (paper, section 2, eq. 1) with its statistics.

    Returns:
        y of shape (M, K) and `FFNStats`.
    """
    gate_MN = ACTIVATIONS[activation](F.linear(x_MK, w_gate_NK))
    h_MN = gate_MN * F.linear(x_MK, w_up_NK)
    return F.linear(h_MN, w_down_KN), ffn_stats(h_MN, gate_MN)


def non_gated_ffn(
    x_MK: Tensor, w_up_NK: Tensor, w_down_KN: Tensor, activation: str = "relu"
) -> tuple[Tensor, FFNStats]:
    """``y = act(x W_u) W_d`` (paper's non-gated variant) with its statistics.

    Returns:
        y of shape (M, K) and `FFNStats`; the up-projection is its own gate.
    """
    h_MN = ACTIVATIONS[activation](F.linear(x_MK, w_up_NK))
    return F.linear(h_MN, w_down_KN), ffn_stats(h_MN, h_MN)


class FFNWeights(NamedTuple):
    """What an FFN computes with at inference, see `fatrelu_ffn`; as `nn.Linear` stores it."""

    gate_NK: Tensor | None  # None: the non-gated variant
    up_NK: Tensor
    down_KN: Tensor
    b_gate_N: Tensor | None
    b_up_N: Tensor | None
    b_down_K: Tensor | None
    threshold: float  # FATReLU's: a gate that is not above it counts as zero; 0 is ReLU


def fatrelu_ffn(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """``(fatrelu(x W_g + b_g) * (x W_u + b_u)) W_d + b_d``; y of (M, K).

    Without W_g ``fatrelu(x W_u + b_u) W_d + b_d``. NaN passes, as through relu.
    """
    up_MN = F.linear(x_MK, w.up_NK, w.b_up_N)
    gate_MN = up_MN if w.gate_NK is None else F.linear(x_MK, w.gate_NK, w.b_gate_N)
    gate_MN = torch.where(gate_MN <= w.threshold, 0, gate_MN)
    h_MN = gate_MN if w.gate_NK is None else gate_MN * up_MN
    return F.linear(h_MN, w.down_KN, w.b_down_K)
