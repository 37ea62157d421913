"""Computes a gate in either format: on Hopper by a GEMM whose epilogue packs it, elsewhere by a
dense GEMM and a kernel that packs its result.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

import functools
from collections.abc import Mapping

from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import architecture_of
from sparsellm.ffn.kernels.launch import Kernel, tensor_map
from sparsellm.ffn.kernels.quantise import quantise_rows
from sparsellm.ffn.quantised import linear
from sparsellm.ffn.types import BLOCK_TOKENS, TILE_NEURONS, FFNWeights, Format


def compute_gate(
    format: Format,
    x_MK: Tensor,
    w: FFNWeights,
    out: Mapping[str, object],
    token_M: Tensor | None = None,
) -> None:
    """``out`` ← act(x Wᵀ + bias); what is not above the threshold counts as zero.

    With quantised weights the product is computed in FP8, and x is quantised here.

    Args:
        format: of the result.
        x_MK: the tokens.
        w: the FFN; its `first` matrix decides which neurons are active.
        out: the kernels' arguments for the result, by name; they are the same on every GPU.
        token_M: (M,) int32, the row of x that each row of the result comes from; None where it is
            the same. Only in the union format, and only if `union.gathers` is true.
    """
    if not architecture_of(x_MK.get_device()).makes_gate:
        assert token_M is None
        gate_MN = linear(x_MK, *w.first_multiplied, quantise_rows)
        pack(format, gate_MN, w.threshold, out, w.activation)
        return
    w_NK, bias_N = w.first
    x_scale_M = w_scale_N = None
    kernel = kernel_for(f"gate_{format}", x_MK, w.activation, fp8=w.quantised is not None)
    if w.quantised is not None:
        (x_MK, x_scale_M), token_M = quantise_rows(x_MK, token_M), None
        w_NK, w_scale_N = w.quantised
    (m, k), n = x_MK.shape, w_NK.shape[0]
    grid, tokens, neurons = _division(kernel, m, n)
    gathered = {"x_MK": x_MK, "token_M": token_M} if format == "union" else {}
    kernel.launch(
        grid,
        map_of_x=tensor_map(x_MK.data_ptr(), m, k, tokens, x_MK.element_size()),
        map_of_w=tensor_map(w_NK.data_ptr(), n, k, neurons, w_NK.element_size()),
        bias_N=bias_N,
        m=m,
        n=n,
        k=k,
        threshold=w.threshold,
        x_scale_M=x_scale_M,
        w_scale_N=w_scale_N,
        **gathered,
        **out,
    )


@functools.lru_cache(maxsize=1024)
def _division(kernel: Kernel, m: int, n: int) -> tuple[int, int, int]:
    """Blocks, in whole clusters, and how many rows of x and of the weight a block loads at once."""
    tokens, cluster = kernel.exported("tokens"), kernel.exported("cluster")
    pairs = -(-m // (cluster * tokens)) * -(-n // TILE_NEURONS)  # tiles of a cluster
    grid = kernel.blocks_for(cluster * pairs) // cluster * cluster
    # Each block of a cluster loads its share of the neurons.
    return grid, tokens, TILE_NEURONS // cluster


def pack(
    format: Format,
    gate_MN: Tensor,
    threshold: float,
    out: Mapping[str, object],
    activation: str = "relu",
) -> None:
    """`compute_gate` from its dense product, by ``pack_<format>``."""
    (m, n), kernel = gate_MN.shape, kernel_for(f"pack_{format}", gate_MN, activation)
    tiles = -(-n // TILE_NEURONS)
    if format == "union":
        grid = -(-m // BLOCK_TOKENS) * tiles
    else:
        grid = -(-m * tiles // (kernel.threads // 32))  # a warp packs a row of a tile
    kernel.launch(grid, gate_MN=gate_MN, threshold=threshold, m=m, n=n, **out)
