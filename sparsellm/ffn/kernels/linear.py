"""Linear layers of up to 64 tokens: ``cuda/common/decode_linear.cu``.

A call takes as long as reading the weights, in 8 or 16 bits. Tokens are not quantised.

Shapes: M tokens, K in_features.
"""

from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import has_kernels
from sparsellm.ffn.quantised import QuantisedRows, linear_of_few
from sparsellm.ffn.types import MAX_DECODE_TOKENS, Linear

_NARROW_TOKENS = 8  # `decode_linear`; above it is `decode_linear_wide`
_MAX_MATRICES = 3


def takes(x_MK: Tensor, linears: tuple[Linear, ...]) -> bool:
    """Whether `linears` computes these."""
    (m, k), fp8 = x_MK.shape, linears[0].quantised is not None
    return (
        0 < m <= MAX_DECODE_TOKENS
        and has_kernels(x_MK)
        and len(linears) <= _MAX_MATRICES
        and k % (16 if fp8 else 8) == 0
        and all((linear.quantised is not None) == fp8 for linear in linears)
        and all(linear.weight_NK.is_contiguous() for linear in linears)
    )


def linears(x_MK: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """The results of layers that multiply the same x, side by side; x is not quantised."""
    m, k = x_MK.shape
    sizes = [len(linear.weight_NK) for linear in linears]
    y_MN = x_MK.new_empty(m, sum(sizes))
    name = "decode_linear" if m <= _NARROW_TOKENS else "decode_linear_wide"
    kernel = kernel_for(name, x_MK, fp8=linears[0].quantised is not None)
    grid = kernel.blocks_for(-(-sum(sizes) // 16))
    blocks = _division(grid, sizes)
    matrices: dict[str, object] = {}
    for i in range(_MAX_MATRICES):
        linear = linears[i] if i < len(linears) else None
        weight_NK, scale_N = (None, None) if linear is None else linear.stored
        matrices |= {f"w_{i}": weight_NK, f"scale_{i}": scale_N}
        matrices |= {f"bias_{i}": None if linear is None else linear.bias_N}
        matrices |= {f"n_{i}": 0 if linear is None else sizes[i]}
    kernel.launch(
        sum(blocks),
        x_MK=x_MK,
        m=m,
        k=k,
        blocks_0=blocks[0],
        blocks_1=blocks[1],
        y_MN=y_MN,
        **matrices,
    )
    return y_MN


def quantised_linear(x_MK: Tensor, w: QuantisedRows, bias_N: Tensor | None) -> Tensor:
    """`quantised.linear_of_few`, by the kernel if it can."""
    layers = (Linear(w.values_MK, bias_N, w),)
    if takes(x_MK, layers):
        return linears(x_MK, layers)
    return linear_of_few(x_MK, w, bias_N)


def _division(grid: int, sizes: list[int]) -> tuple[int, int, int]:
    """How many blocks compute each matrix: in proportion to its rows, and at least one."""
    blocks = [max(round(grid * size / sum(sizes)), 1) for size in sizes]
    blocks[0] = max(blocks[0] + grid - sum(blocks), 1)
    first, second, third = (*blocks, 0, 0)[:_MAX_MATRICES]
    return first, second, third
