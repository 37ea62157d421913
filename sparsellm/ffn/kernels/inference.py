"""The FFN's forward on every path.

With up to 64 tokens it takes as long as reading the weights. ``cuda/common/decode_gate.cu`` reads
the gate's weights (8 bits each in FP8) and the rows of W_u whose neurons are active;
``decode_down.cu`` reads the same neurons' rows of W_d; ``decode.cuh`` is their interface.

Shapes: M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS`,
contiguous, on one GPU.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.kernels import twell, union
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.launch import Address, Kernel
from sparsellm.ffn.kernels.linear import quantised_linear
from sparsellm.ffn.kernels.quantise import quantise_rows
from sparsellm.ffn.quantised import linear
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
        w: the FFN; W_d is read transposed.
        observed: address of an int32 in pinned memory; the kernels write there how many distinct
            neurons are active for the tokens of a block on average (TwELL: for a token). 0:
            nowhere.
        token_M: (M,) int32, the order in which tokens are divided into blocks; None is the natural
            one. TwELL has no blocks.
        format: in which the gate is stored; with up to 64 tokens it is not stored.
    """
    y_MK = torch.empty_like(x_MK)
    if x_MK.shape[0] <= MAX_DECODE_TOKENS:
        decode_ffn(x_MK, w, y_MK, observed)
    elif format == "twell":
        gate = twell.empty_twell(x_MK.shape[0], w.up_NK.shape[0], x_MK.device)
        twell.gate_twell(x_MK, w, gate)
        twell.twell_ffn(gate, x_MK, w, y_MK, observed)
    else:
        _by_union(x_MK, w, y_MK, observed, token_M)
    return y_MK


def _by_union(
    x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int, token_M: Tensor | None
) -> None:
    n, rows_M = w.up_NK.shape[0], token_M
    if token_M is not None and not union.gathers(x_MK):
        x_MK, rows_M = x_MK.index_select(0, token_M), None
    gate = union.empty_union(x_MK, n, union.splits_for(x_MK, n, token_M))
    union.gate_union(x_MK, w, gate, observed, token_M=rows_M)
    if w.gate_NK is not None:
        union.union_up(x_MK, w, gate, token_M=rows_M)
    union.union_down(gate, w, y_MK, token_M)


def decode_ffn(x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int = 0) -> None:
    """``y`` ← ``reference.fatrelu_ffn(x, w)``, on the current stream.

    Quantised weights are used as the numbers that they stand for; x is not quantised.

    Args:
        x_MK: 1 to `MAX_DECODE_TOKENS` tokens.
        w: the FFN; W_d is read transposed.
        y_MK: the output.
        observed: address of an int32, pinned, for the number of neurons active for any token; 0
            for none.

    Raises:
        ValueError: K is not a multiple of 16, in FP8.
    """
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    if w.quantised is not None and k % 16:
        raise ValueError(f"decode_ffn: hidden_size {k} must be a multiple of 16 in FP8")
    first_NK, scale_N = (w.first[0], None) if w.quantised is None else w.quantised
    gate = kernel_for("decode_gate", x_MK, w.activation, fp8=scale_N is not None)
    down = kernel_for("decode_down", x_MK)
    sections, stride, neuron_at = _division(gate, n)
    padded = next(size for size in (8, 16, 32, 64) if m <= size)
    # One allocation: count, neuron and value of cuda/common/decode.cuh.
    value_at = neuron_at + 2 * sections * stride
    scratch = torch.empty(value_at + 2 * n * padded, dtype=torch.uint8, device=x_MK.device)
    count = scratch.data_ptr()
    active = {
        "stride": stride,
        "count": Address(count),
        "neuron": Address(count + neuron_at),
        "value": Address(count + value_at),
    }
    gate.launch(
        sections,
        x_MK=x_MK,
        w_NK=first_NK,
        bias_N=w.first[1],
        w_up_NK=w.second[0],
        bias_up_N=w.second[1],
        w_down_NK=w.down_NK,
        m=m,
        n=n,
        k=k,
        threshold=w.threshold,
        relu_up=w.relu_up,
        scale_N=scale_N,
        **active,
    )
    down.launch(
        -(-k // down.exported("columns")),
        w_NK=w.down_NK,
        bias_K=w.b_down_K,
        m=m,
        n=n,
        k=k,
        sections=sections,
        y_MK=y_MK,
        observed=Address(observed),
        **active,
    )


@functools.lru_cache(maxsize=256)
def _division(gate: Kernel, num_neurons: int) -> tuple[int, int, int]:
    """Sections, stride and the bytes before `neuron`, see ``cuda/common/decode.cuh``."""
    most, longest = gate.exported("max_sections"), gate.exported("max_section")
    sections = min(max(gate.num_multiprocessors, -(-num_neurons // longest)), most, num_neurons)
    stride = -(-num_neurons // (16 * sections)) * 16
    return sections, stride, 4 * most


def dense_ffn(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """Computes y, (M, K), by cuBLAS, with one kernel between its products.

    It is as fast as what ``torch.compile`` makes. In FP8 the gate is the one of the sparse path.
    """
    if w.quantised is not None and x_MK.shape[0] <= MAX_DECODE_TOKENS:
        gate_MN = quantised_linear(x_MK, w.quantised, w.first[1])
    else:
        gate_MN = linear(x_MK, *w.first_multiplied, quantise_rows)
    h_MN, up_MN = gate_MN, None
    if w.gate_NK is not None:
        up_MN = h_MN = F.linear(x_MK, w.up_NK, w.b_up_N)  # which h overwrites
    kernel = kernel_for("relu_product", h_MN, w.activation)
    octets = h_MN.numel() // kernel.exported("values")
    grid = -(-octets // kernel.threads)
    kernel.launch(
        grid,
        gate=gate_MN,
        up=up_MN,
        h=h_MN,
        num_octets=octets,
        threshold=w.threshold,
        relu_up=w.relu_up,
    )
    return F.linear(h_MN, w.down_KN, w.b_down_K)
