"""What the operators of training_ops.py compute: by kernels on a GPU, elsewhere in plain torch.

Shapes: M tokens, K hidden_size, N intermediate_size, C capacity in columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.ffn.operator_tools import cast_weights, check_cuda, for_kernels, runs_kernels
from sparsellm.ffn.reference import sparse_backward, sparse_forward
from sparsellm.ffn.types import Columns, FFNGradients, FFNWeights, GradientSums, KernelWeights

Forward = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]  # fmt: skip


def union_forward(
    x_MK: Tensor, w: FFNWeights, ready: KernelWeights | None, capacity: int, token_M: Tensor | None
) -> Forward:
    """The results of `training_ops.sparse_ffn_forward`.

    ``ready``: the matrices as the kernels read them, where the step shares them.
    """
    if runs_kernels(x_MK):
        check_cuda(x_MK, w)
        from sparsellm.ffn.kernels import union_training

        with torch.cuda.device(x_MK.get_device()):
            cast = for_kernels(w, x_MK.dtype, ready)
            return union_training.forward(x_MK, cast, cast.down_KN.t(), capacity, token_M)
    # An operator's inside still sees autocast; here every type is chosen.
    with torch.autocast(x_MK.device.type, enabled=False):
        cast = cast_weights(w, x_MK.dtype, ready)
        y_MK, stats, columns = sparse_forward(x_MK, cast, capacity, token_M)
    return (y_MK, stats.l1_sum, stats.nnz_M, stats.fired_N, *columns)


def union_backward(  # noqa: PLR0917
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    w: FFNWeights,
    ready: KernelWeights | None,
    saved: Columns,
    token_M: Tensor | None,
    sums: GradientSums | None = None,
) -> FFNGradients:
    """The gradients of `training_ops.sparse_ffn_backward`.

    With ``sums`` those of the matrices are added there.
    """
    if runs_kernels(x_MK):
        from sparsellm.ffn.kernels import union_training

        with torch.cuda.device(x_MK.get_device()):
            cast, own = for_kernels(w, x_MK.dtype, ready), w.up_NK.dtype
            down_NK = cast.down_KN.t()
            return union_training.backward(
                dy_MK, d_l1, x_MK, cast, down_NK, saved, own, token_M, sums
            )
    with torch.autocast(x_MK.device.type, enabled=False):
        cast = cast_weights(w, x_MK.dtype, ready)
        found = sparse_backward(dy_MK, d_l1, x_MK, cast, saved, token_M)
    return found if sums is None else found.added_to(sums)
