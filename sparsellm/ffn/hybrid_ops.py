"""Training the FFN in the paper's hybrid format: forward and backward as `torch.library` operators.

Shapes: M tokens, K hidden_size, N intermediate_size, W width of the ELL matrix, R rows of the dense
backup. As `training_ops`, for the format ``twell``; on a CPU the plain torch of formats.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.formats import (
    COMPRESSION,
    MAX_ELL_WIDTH,
    Hybrid,
    hybrid_backward,
    hybrid_forward,
)
from sparsellm.ffn.inference_ops import check_order, check_weights
from sparsellm.ffn.operator_tools import (
    Gradients,
    cast_weights,
    check_cuda,
    fake_backward,
    fake_backward_into,
    for_kernels,
    in_own_types,
    of_present,
    present_gradients,
    ready_weights,
    runs_kernels,
    without_biases,
)
from sparsellm.ffn.token_order import in_order
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    FFNGradients,
    FFNStats,
    FFNWeights,
    GradientSums,
    KernelWeights,
    StepShared,
    TokenOrder,
)

_DEVICES = ("cpu", "cuda")
_WIDTH = 8  # its place among the arguments of `hybrid_ffn_forward`
_FORWARD_STATS = 5  # outputs before the hybrid format
_Forward = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]  # fmt: skip


def hybrid_ffn_training(  # noqa: PLR0917
    x_MK: Tensor,
    w: FFNWeights,
    width: int,
    backup_rows: int,
    order: TokenOrder | None = None,
    shared: StepShared | None = None,
) -> tuple[Tensor, FFNStats]:
    """`training_ops.sparse_ffn_training` in the hybrid format.

    Args:
        x_MK: the tokens; bf16 on a GPU.
        w: the FFN; its threshold must be 0 (ReLU).
        width: W; rows with more non-zeros, or with a tile that overflows TwELL, are dense.
        backup_rows: R; further dense rows are computed again in the backward pass, and counted in
            ``stats.recomputed``. 0 where there will be none.
        order: as there; nothing but ``stats.union_sum`` depends on it.
        shared: as there.

    Raises:
        ValueError: shapes, types, devices or a width that do not fit, by name.
    """
    device = x_MK.device.type
    if torch.is_autocast_enabled(device):
        x_MK = x_MK.to(torch.get_autocast_dtype(device))
    token_M = None if order is None else order.token_M
    y_MK, l1_sum, nnz_M, fired_N, union_sum, *saved = hybrid_ffn_forward(
        x_MK.contiguous() if order is None else in_order(x_MK, order),
        *w[:6],
        token_M,
        width,
        backup_rows,
        *((None,) * 3 if shared is None else shared.weights),
        *((None,) * 3 if shared is None or shared.sums is None else shared.sums),
    )
    recomputed = (Hybrid(*saved).counted[0] - backup_rows).clamp(min=0).long()
    return y_MK, FFNStats(l1_sum, nnz_M, fired_N, union_sum, recomputed=recomputed)


@torch.library.custom_op("sparsellm::hybrid_ffn_forward", mutates_args=(), device_types=_DEVICES)
def hybrid_ffn_forward(  # noqa: PLR0917 - operators have no keyword-only tensors
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    b_down_K: Tensor | None,
    token_M: Tensor | None,
    width: int,
    backup_rows: int,
    kernel_gate_NK: Tensor | None = None,
    kernel_up_NK: Tensor | None = None,
    kernel_down_NK: Tensor | None = None,
    sum_gate_NK: Tensor | None = None,
    sum_up_NK: Tensor | None = None,
    sum_down_NK: Tensor | None = None,
) -> _Forward:
    """See `hybrid_ffn_training`, which is what to call; arguments as of `sparse_ffn_forward`.

    Returns:
        y (M, K); l1_sum () fp32; nnz (M,) and fired (N,) int32; union_sum () int64; `Hybrid` one by
        one. Gradients flow through y and l1_sum.
    """
    w = FFNWeights(w_gate_NK, w_up_NK, w_down_KN, b_gate_N, b_up_N, b_down_K, 0.0)
    ready = ready_weights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    _check(x_MK, w, token_M, width)
    if runs_kernels(x_MK):
        check_cuda(x_MK, w)
        from sparsellm.ffn.kernels import hybrid

        with torch.cuda.device(x_MK.get_device()):
            cast = for_kernels(w, x_MK.dtype, ready)
            found = hybrid.forward(x_MK, cast, cast.down_KN.t(), width, backup_rows, token_M)
    else:
        # An operator's inside still sees autocast; here every type is chosen.
        with torch.autocast(x_MK.device.type, enabled=False):
            cast = cast_weights(w, x_MK.dtype, ready)
            found = hybrid_forward(x_MK, cast, width, backup_rows, COMPRESSION, token_M)
    y_MK, stats, saved = found
    return (y_MK, *stats[: _FORWARD_STATS - 1], *saved)  # type: ignore[return-value]


@hybrid_ffn_forward.register_fake
def _(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, *further: Any) -> _Forward:
    width, backup_rows = further[_WIDTH - 3 : _WIDTH - 1]
    (m, _), n, gated = x_MK.shape, w_up_NK.shape[0], w_gate_NK is not None
    blocks = (m + BLOCK_TOKENS - 1) // BLOCK_TOKENS

    def ints(*shape: int) -> Tensor:
        return x_MK.new_empty(shape, dtype=torch.int32)

    return (
        torch.empty_like(x_MK),
        x_MK.new_empty((), dtype=torch.promote_types(x_MK.dtype, torch.float32)),
        ints(m),
        ints(n),
        x_MK.new_empty((), dtype=torch.int64),
        ints(m, width),
        ints(m),
        ints(2 * blocks),
        ints(m),
        ints(8),
        x_MK.new_empty(0 if x_MK.dtype == torch.bfloat16 else m, width),
        x_MK.new_empty(m if gated else 0, width),
        x_MK.new_empty(backup_rows if gated else 0, n),
        x_MK.new_empty(backup_rows, n),
        x_MK.new_empty(blocks, n, dtype=torch.uint8),
    )


@torch.library.custom_op("sparsellm::hybrid_ffn_backward", mutates_args=(), device_types=_DEVICES)
def hybrid_ffn_backward(  # noqa: PLR0917
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
    kernel_gate_NK: Tensor | None,
    kernel_up_NK: Tensor | None,
    kernel_down_NK: Tensor | None,
    saved: list[Tensor],
) -> Gradients:
    """Gradients of ``Σ dy * y + d_l1 * l1_sum``, as `training_ops.sparse_ffn_backward`."""
    w = FFNWeights(w_gate_NK, w_up_NK, w_down_KN, b_gate_N, b_up_N, b_down_K, 0.0)
    ready = ready_weights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    found = _backward(dy_MK, d_l1, x_MK, w, ready, Hybrid(*saved), token_M, None)
    return in_own_types(found, x_MK, w)


hybrid_ffn_backward.register_fake(fake_backward)


@torch.library.custom_op(
    "sparsellm::hybrid_ffn_backward_into",
    mutates_args=("sum_gate_NK", "sum_up_NK", "sum_down_NK"),
    device_types=_DEVICES,
)
def hybrid_ffn_backward_into(  # noqa: PLR0917
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    token_M: Tensor | None,
    kernel_gate_NK: Tensor | None,
    kernel_up_NK: Tensor,
    kernel_down_NK: Tensor,
    saved: list[Tensor],
    sum_gate_NK: Tensor | None,
    sum_up_NK: Tensor,
    sum_down_NK: Tensor,
) -> Tensor:
    """`hybrid_ffn_backward` without biases; adds the matrices' gradients; that of x is returned."""
    ready = KernelWeights(kernel_gate_NK, kernel_up_NK, kernel_down_NK)
    sums, w = GradientSums(sum_gate_NK, sum_up_NK, sum_down_NK), without_biases(ready)
    return _backward(dy_MK, d_l1, x_MK, w, ready, Hybrid(*saved), token_M, sums).x_MK


hybrid_ffn_backward_into.register_fake(fake_backward_into)


def _backward(  # noqa: PLR0917
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    w: FFNWeights,
    ready: KernelWeights | None,
    saved: Hybrid,
    token_M: Tensor | None,
    sums: GradientSums | None,
) -> FFNGradients:
    """By kernels or in plain torch; with ``sums`` the matrices' gradients are added there."""
    if runs_kernels(x_MK):
        from sparsellm.ffn.kernels import hybrid

        with torch.cuda.device(x_MK.get_device()):
            cast, own = for_kernels(w, x_MK.dtype, ready), w.up_NK.dtype
            down_NK = cast.down_KN.t()
            return hybrid.backward(dy_MK, d_l1, x_MK, cast, down_NK, saved, own, token_M, sums)
    with torch.autocast(x_MK.device.type, enabled=False):
        cast = cast_weights(w, x_MK.dtype, ready)
        found = hybrid_backward(dy_MK, d_l1, x_MK, cast, saved, token_M)
    return found if sums is None else found.added_to(sums)


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Forward) -> None:
    x_MK, *parameters, token_M = inputs[:_WIDTH]
    kernels, sums = inputs[_WIDTH + 2 : _WIDTH + 5], inputs[_WIDTH + 5 :]
    _, _, *counts = output
    ctx.mark_non_differentiable(*counts)
    ctx.set_materialize_grads(False)
    saved = output[_FORWARD_STATS:]
    ctx.save_for_backward(x_MK, token_M, *parameters, *kernels, *sums, *saved)


def _gradients(ctx: Any, dy_MK: Tensor | None, d_l1: Tensor | None, *_: None) -> tuple[Any, ...]:
    x_MK, token_M, *further = ctx.saved_tensors
    parameters, kernels, sums = further[:6], further[6:9], further[9:12]
    saved = list(further[12:])
    dy_MK, d_l1 = present_gradients(x_MK, dy_MK, d_l1)
    rest = (None,) * 9  # token_M, width, rows of the backup, kernels' weights and sums
    if sums[1] is not None:
        dx_MK = hybrid_ffn_backward_into(dy_MK, d_l1, x_MK, token_M, *kernels, saved, *sums)
        return (dx_MK, *(None,) * 6, *rest)
    found = hybrid_ffn_backward(dy_MK, d_l1, x_MK, *parameters, token_M, *kernels, saved)
    return (*of_present([x_MK, *parameters], found), *rest)


hybrid_ffn_forward.register_autograd(_gradients, setup_context=_save)


def _check(x_MK: Tensor, w: FFNWeights, token_M: Tensor | None, width: int) -> None:
    if x_MK.ndim != 2 or w.up_NK.ndim != 2:
        raise ValueError(f"hybrid_ffn: x {tuple(x_MK.shape)} must be (tokens, hidden_size)")
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    if not 1 <= width <= MAX_ELL_WIDTH or m * width >= 2**31:
        raise ValueError(
            f"hybrid_ffn: an ELL matrix of {m:,} × {width:,}: the width must be 1 to "
            f"{MAX_ELL_WIDTH:,}, and the product under 2³¹"
        )
    check_weights(w, k, n, w.up_NK.dtype, x_MK.device)
    if token_M is not None:
        check_order(token_M, m, x_MK.device)
