"""The FFN on its sparsity pattern as a `torch.library` operator, for inference.

Shapes: M tokens, K hidden_size, N intermediate_size. On a CPU the operator is plain torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.kernels import union

MAX_NEURONS = 65_536  # 16-bit column slots, cuda/union.cuh


@torch.library.custom_op("sparsellm::sparse_ffn", mutates_args=(), device_types="cuda")
def sparse_ffn(  # noqa: PLR0917 - operators have no keyword-only tensors
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    packed_down: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    b_down_K: Tensor | None,
    threshold: float,
) -> Tensor:
    """``(relu(x W_g + b_g) * (x W_u + b_u)) W_d + b_d``, work only where the gate fires.

    Args:
        x_MK: bf16, contiguous, on a Hopper GPU.
        w_gate_NK: bf16; None for the non-gated variant ``relu(x W_u + b_u) W_d + b_d``.
        w_up_NK: bf16.
        packed_down: W_d from `kernels.union.pack_down`.
        b_gate_N: bf16 or None, as the other biases.
        b_up_N: likewise.
        b_down_K: likewise.
        threshold: FATReLU's: what is not above it counts as zero; 0 is ReLU.

    Returns:
        y of (M, K).
    """
    _check(x_MK, w_up_NK, packed_down, threshold)
    gate = union.empty_union(x_MK.shape[0], w_up_NK.shape[0], x_MK.device)
    if w_gate_NK is None:
        union.gate_union(x_MK, w_up_NK, b_up_N, threshold, gate)
    else:
        union.gate_union(x_MK, w_gate_NK, b_gate_N, threshold, gate)
        union.union_up(x_MK, w_up_NK, b_up_N, gate)
    y_MK = torch.empty_like(x_MK)
    union.union_down(gate, packed_down, b_down_K, y_MK)
    return y_MK


@sparse_ffn.register_fake
def _(x_MK: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_MK)


@sparse_ffn.register_kernel("cpu")
def _(  # noqa: PLR0917
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    packed_down: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    b_down_K: Tensor | None,
    threshold: float,
) -> Tensor:
    _check(x_MK, w_up_NK, packed_down, threshold)
    up_MN = F.linear(x_MK, w_up_NK, b_up_N)
    gate_MN = up_MN if w_gate_NK is None else F.linear(x_MK, w_gate_NK, b_gate_N)
    gate_MN = torch.where(gate_MN <= threshold, 0, gate_MN)  # NaN passes, as through relu
    h_MN = gate_MN if w_gate_NK is None else gate_MN * up_MN
    return F.linear(h_MN, union.unpack_down(packed_down, x_MK.shape[1]), b_down_K)


def beyond_limits(k: int, n: int) -> str | None:
    """Why the operator cannot take a hidden_size and intermediate_size, or None."""
    if k % 8 or n % 8 or n > MAX_NEURONS:
        return (
            f"hidden_size {k} and intermediate_size {n} must be multiples of 8, and the latter at "
            f"most {MAX_NEURONS}"
        )
    return None


def _check(x_MK: Tensor, w_up_NK: Tensor, packed_down: Tensor, threshold: float) -> None:
    (m, k), n = x_MK.shape, w_up_NK.shape[0]
    if m < 1 or w_up_NK.shape != (n, k) or packed_down.shape != (n, -(-k // 32) * 32):
        raise ValueError(
            f"sparse_ffn: x {tuple(x_MK.shape)}, W_u {tuple(w_up_NK.shape)} and packed W_d "
            f"{tuple(packed_down.shape)} do not belong together; pack W_d with pack_down"
        )
    if reason := beyond_limits(k, n):
        raise ValueError(f"sparse_ffn: {reason}; use the dense FFN")
    if not x_MK.is_contiguous() or not w_up_NK.is_contiguous():
        raise ValueError("sparse_ffn: x and the weights must be contiguous")
    if threshold < 0:
        raise ValueError(f"sparse_ffn: threshold {threshold} must not be negative")
