"""Training the FFN on its sparsity pattern: forward and backward as `torch.library` operators.

Shapes: M tokens, K hidden_size, N intermediate_size, C capacity in columns. On a CPU the operators
are the plain torch of reference.py. They hold no state: what they compute depends on their
arguments alone, so compiling, recomputing and sharding need nothing special.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.inference_ops import check_order, check_weights
from sparsellm.ffn.operator_tools import (
    Gradients,
    fake_backward,
    fake_backward_into,
    in_own_types,
    of_present,
    present_gradients,
    ready_weights,
    without_biases,
)
from sparsellm.ffn.token_order import in_order
from sparsellm.ffn.training_paths import Forward, union_backward, union_forward
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    Columns,
    FFNStats,
    FFNWeights,
    GradientSums,
    KernelWeights,
    StepShared,
    TokenOrder,
)

_DEVICES = ("cpu", "cuda")
_CAPACITY = 8  # its place among the arguments of `sparse_ffn_forward`


def sparse_ffn_training(
    x_MK: Tensor,
    w: FFNWeights,
    capacity: int,
    order: TokenOrder | None = None,
    shared: StepShared | None = None,
) -> tuple[Tensor, FFNStats]:
    """``y = (relu(x W_g + b_g) * (x W_u + b_u)) W_d + b_d`` and its statistics, for training.

    Computes in the type of x, under autocast in autocast's. Weights may be of another type: they
    are cast inside, and their gradients come back in their own type without having been rounded to
    that of x. Nothing is lost where the pattern does not fit: backward then computes it again.

    Args:
        x_MK: the tokens; bf16 on a GPU.
        w: the FFN; its threshold must be 0 (ReLU).
        capacity: columns that are kept for the backward pass (`reference.Columns`), of at most
            ``blocks * N``; 0 where there will be none. The pattern did not fit where
            ``stats.union_sum`` exceeds it.
        order: in which to compute; it changes ``stats.union_sum`` and the order of sums, and
            nothing else.
        shared: of this optimizer step. The matrices are then not cast and transposed here; with
            ``shared.sums`` the backward pass adds their gradients there, and autograd gets none.

    Raises:
        ValueError: shapes, types, devices or a capacity that do not fit, by name.
    """
    device = x_MK.device.type
    if torch.is_autocast_enabled(device):
        x_MK = x_MK.to(torch.get_autocast_dtype(device))
    if order is None:
        return sparse_ffn_of_rows(x_MK.contiguous(), w, capacity, None, shared)
    return sparse_ffn_of_rows(in_order(x_MK, order), w, capacity, order.token_M, shared)


def sparse_ffn_of_rows(
    x_MK: Tensor,
    w: FFNWeights,
    capacity: int,
    token_M: Tensor | None,
    shared: StepShared | None = None,
) -> tuple[Tensor, FFNStats]:
    """`sparse_ffn_training` of tokens that are in order already.

    Args:
        x_MK: contiguous, and of the type to compute in.
        w: as there.
        capacity: as there.
        token_M: (M,) int32, the token of each row of x; y and nnz are by token.
        shared: as there.
    """
    y_MK, l1_sum, nnz_M, fired_N, offset, *_ = sparse_ffn_forward(
        x_MK,
        w.gate_NK,
        w.up_NK,
        w.down_KN,
        w.b_gate_N,
        w.b_up_N,
        w.b_down_K,
        token_M,
        capacity,
        *((None,) * 3 if shared is None else shared.weights),
        *((None,) * 3 if shared is None or shared.sums is None else shared.sums),
    )
    return y_MK, FFNStats(l1_sum, nnz_M, fired_N, offset[-1].long())


@torch.library.custom_op("sparsellm::sparse_ffn_forward", mutates_args=(), device_types=_DEVICES)
def sparse_ffn_forward(  # noqa: PLR0917 - operators have no keyword-only tensors
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    b_down_K: Tensor | None,
    token_M: Tensor | None,
    capacity: int,
    kernel_gate_NK: Tensor | None = None,
    kernel_up_NK: Tensor | None = None,
    kernel_down_NK: Tensor | None = None,
    sum_gate_NK: Tensor | None = None,
    sum_up_NK: Tensor | None = None,
    sum_down_NK: Tensor | None = None,
) -> Forward:
    """See `sparse_ffn_training`, which is what to call.

    Args: ``token_M``: (M,) int32, the token of each row of x; y and nnz are by token.
    ``kernel_…``: `KernelWeights`, all or none. ``sum_…``: `GradientSums`, all or none.

    Returns:
        y (M, K); l1_sum () fp32; nnz (M,) and fired (N,) int32; `reference.Columns` one by one.
        Gradients flow through y and l1_sum.
    """
    w = FFNWeights(w_gate_NK, w_up_NK, w_down_KN, b_gate_N, b_up_N, b_down_K, 0.0)
    ready = ready_weights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    _check(x_MK, w, token_M, capacity)
    return union_forward(x_MK, w, ready, capacity, token_M)


@sparse_ffn_forward.register_fake
def _(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, *further: Any) -> Forward:
    capacity = further[_CAPACITY - 3]
    m, n = x_MK.shape[0], w_up_NK.shape[0]
    blocks = (m + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    device = x_MK.device if capacity == blocks * n else "cpu"  # of `Columns.needed`
    return (
        torch.empty_like(x_MK),
        x_MK.new_empty((), dtype=torch.promote_types(x_MK.dtype, torch.float32)),
        x_MK.new_empty(m, dtype=torch.int32),
        x_MK.new_empty(n, dtype=torch.int32),
        x_MK.new_empty(blocks + 1, dtype=torch.int32),
        x_MK.new_empty(capacity, dtype=torch.int32),
        x_MK.new_empty(capacity, dtype=torch.int64),
        x_MK.new_empty(0 if w_gate_NK is None else capacity, BLOCK_TOKENS),
        x_MK.new_empty(capacity, BLOCK_TOKENS),
        torch.empty(2, dtype=torch.int64, device=device),
    )


@torch.library.custom_op("sparsellm::sparse_ffn_backward", mutates_args=(), device_types=_DEVICES)
def sparse_ffn_backward(  # noqa: PLR0917
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    b_down_K: Tensor | None,
    token_M: Tensor | None,
    columns: list[Tensor],
    kernel_gate_NK: Tensor | None = None,
    kernel_up_NK: Tensor | None = None,
    kernel_down_NK: Tensor | None = None,
) -> Gradients:
    """Gradients of ``Σ dy * y + d_l1 * l1_sum``.

    Args: dy (contiguous, of x's type, by token) and d_l1 (); what forward was given, without the
    capacity and the sums; the columns that it returned.

    Returns:
        Of x, W_g, W_u, W_d, b_g, b_u, b_d, each of its type; (0,) for an absent one.
    """
    w = FFNWeights(w_gate_NK, w_up_NK, w_down_KN, b_gate_N, b_up_N, b_down_K, 0.0)
    ready = ready_weights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    return in_own_types(
        union_backward(dy_MK, d_l1, x_MK, w, ready, Columns(*columns), token_M), x_MK, w
    )


sparse_ffn_backward.register_fake(fake_backward)


@torch.library.custom_op(
    "sparsellm::sparse_ffn_backward_into",
    mutates_args=("sum_gate_NK", "sum_up_NK", "sum_down_NK"),
    device_types=_DEVICES,
)
def sparse_ffn_backward_into(  # noqa: PLR0917
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    token_M: Tensor | None,
    columns: list[Tensor],
    kernel_gate_NK: Tensor | None,
    kernel_up_NK: Tensor,
    kernel_down_NK: Tensor,
    sum_gate_NK: Tensor | None,
    sum_up_NK: Tensor,
    sum_down_NK: Tensor,
) -> Tensor:
    """`sparse_ffn_backward` of an FFN without biases that adds the matrices' gradients to the sums.

    Returns:
        The gradient of x.
    """
    ready = KernelWeights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    w = without_biases(ready)
    sums = GradientSums(sum_gate_NK, sum_up_NK, sum_down_NK)
    return union_backward(dy_MK, d_l1, x_MK, w, ready, Columns(*columns), token_M, sums).x_MK


sparse_ffn_backward_into.register_fake(fake_backward_into)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    x_MK, *parameters, token_M, _ = inputs[: _CAPACITY + 1]
    kernels, sums = inputs[_CAPACITY + 1 : _CAPACITY + 4], inputs[_CAPACITY + 4 :]
    _, _, nnz_M, fired_N, *columns = output
    ctx.mark_non_differentiable(nnz_M, fired_N, *columns)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_MK, token_M, *columns, *kernels, *parameters, *sums)


def _gradients(ctx: Any, dy_MK: Tensor | None, d_l1: Tensor | None, *_: None) -> tuple[Any, ...]:
    x_MK, token_M, *further = ctx.saved_tensors
    columns, kernels = list(further[: len(Columns._fields)]), further[len(Columns._fields) : -9]
    parameters, sums = further[-9:-3], further[-3:]
    dy_MK, d_l1 = present_gradients(x_MK, dy_MK, d_l1)
    rest = (None,) * 8  # token_M, capacity, kernels' weights and sums
    if sums[1] is not None:
        dx_MK = sparse_ffn_backward_into(dy_MK, d_l1, x_MK, token_M, columns, *kernels, *sums)
        return (dx_MK, *(None,) * 6, *rest)
    found = sparse_ffn_backward(dy_MK, d_l1, x_MK, *parameters, token_M, columns, *kernels)
    return (*of_present([x_MK, *parameters], found), *rest)


sparse_ffn_forward.register_autograd(_gradients, setup_context=_save)


def _check(x_MK: Tensor, w: FFNWeights, token_M: Tensor | None, capacity: int) -> None:
    if x_MK.ndim != 2 or w.up_NK.ndim != 2:
        raise ValueError(f"sparse_ffn: x {tuple(x_MK.shape)} must be (tokens, hidden_size)")
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    worst = -(-m // BLOCK_TOKENS) * n
    if not 0 <= capacity <= worst:
        raise ValueError(f"sparse_ffn: capacity {capacity:,} must be 0 to {worst:,} (blocks × N)")
    if worst >= 2**31:
        raise ValueError(f"sparse_ffn: {m:,} tokens × {n:,} neurons are over 2³¹ columns")
    check_weights(w, k, n, w.up_NK.dtype, x_MK.device)
    if token_M is not None:
        check_order(token_M, m, x_MK.device)
