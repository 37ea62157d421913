"""The FFN's forward on every path.

Shapes: M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS`,
contiguous, on one GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.kernels import decode, twell, union
from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.types import MAX_DECODE_TOKENS, FFNWeights, Format


def sparse(
    x_MK: Tensor,
    w: FFNWeights,
    observed: int = 0,
    token_M: Tensor | None = None,
    format: Format = "union",
) -> Tensor:
    """Computes y, (M, K), by the sparse kernels for this GPU and M.

    Args:
        x_MK: the tokens.
        w: the FFN; of W_d its transpose is read.
        observed: address of an int32 in pinned memory; the kernels write there how many neurons
            the tokens of a block fire between them on average (TwELL: how many a token fires). 0:
            nowhere.
        token_M: (M,) int32, the order in which tokens are divided into blocks; None is the natural
            one. TwELL has no blocks.
        format: in which the gate is stored; with up to 64 tokens it is not stored.
    """
    y_MK = torch.empty_like(x_MK)
    if x_MK.shape[0] <= MAX_DECODE_TOKENS:
        decode.decode_ffn(x_MK, w, y_MK, observed)
    elif format == "twell":
        _by_twell(x_MK, w, y_MK, observed)
    else:
        _by_union(x_MK, w, y_MK, observed, token_M)
    return y_MK


def _by_twell(x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int) -> None:
    gate = twell.empty_twell(x_MK.shape[0], w.up_NK.shape[0], x_MK.device)
    twell.gate_twell(x_MK, w, gate)
    twell.twell_ffn(gate, x_MK, w, y_MK, observed)


def _by_union(
    x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int, token_M: Tensor | None
) -> None:
    splits = rows_M = None
    if token_M is not None:
        if union.gathers(x_MK):
            rows_M = token_M
        else:
            x_MK = x_MK.index_select(0, token_M)
        splits = union.allocate_splits(x_MK, w.up_NK.shape[0])
    gate = union.empty_union(
        x_MK.shape[0], w.up_NK.shape[0], x_MK.device, splits, element=x_MK.dtype
    )
    union.gate_union(x_MK, w, gate, observed, token_M=rows_M)
    if w.gate_NK is not None:
        union.union_up(x_MK, w, gate, token_M=rows_M)
    union.union_down(gate, w, y_MK, token_M)


def dense_ffn(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """Computes y, (M, K), by cuBLAS, with one kernel between its products.

    It is as fast as what ``torch.compile`` makes.
    """
    h_MN = F.linear(x_MK, w.up_NK, w.b_up_N)  # up, and in its place h
    gate_MN, up_MN = h_MN, None
    if w.gate_NK is not None:
        gate_MN, up_MN = F.linear(x_MK, w.gate_NK, w.b_gate_N), h_MN
    kernel = kernel_for("relu_product", h_MN, w.activation)
    octets = h_MN.numel() // kernel.exported("values")
    grid = -(-octets // kernel.threads)
    kernel.launch(grid, gate_MN, up_MN, h_MN, octets, w.threshold, w.relu_up)
    return F.linear(h_MN, w.down_KN, w.b_down_K)
