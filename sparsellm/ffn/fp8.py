"""Quantising rows to e4m3, and multiplying them: on a GPU by kernels, elsewhere in plain torch.

Shapes: M tokens, K in_features, N out_features.
"""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.gpu_architecture import described
from sparsellm.ffn.operators import define
from sparsellm.ffn.quantised import QuantisedRows, empty_rows, linear, linear_of_few, rows_in_e4m3
from sparsellm.ffn.types import MAX_DECODE_TOKENS


def quantised_rows(x_MK: Tensor) -> QuantisedRows:
    """Each row in e4m3 with the scale that makes its largest magnitude 448.

    A row with NaN or infinity becomes NaN, as every product with it would be. No gradient.
    """
    x_MK = x_MK.detach()
    # Only compilers need the operator; in eager mode its dispatch takes longer than the launch.
    if type(x_MK) is Tensor and x_MK.is_cuda and not torch.compiler.is_compiling():
        return _quantise_rows(x_MK)
    return QuantisedRows(*torch.ops.sparsellm.quantise_rows(x_MK))


def quantise_into(out: QuantisedRows, x_MK: Tensor) -> None:
    """Writes what `quantised_rows` gives of a matrix into memory that exists."""
    rows = _quantise_rows(x_MK, out)
    if rows is not out:
        for memory, value in zip(out, rows, strict=True):
            memory.copy_(value)


def _quantise_rows(x_MK: Tensor, out: QuantisedRows | None = None) -> QuantisedRows:
    """With ``out``, the kernel writes there and returns it; plain torch ignores it."""
    takes = x_MK.is_cuda and x_MK.dtype != torch.float32 and x_MK.shape[1] % 8 == 0
    if not takes or not x_MK.numel():
        return rows_in_e4m3(x_MK)
    from sparsellm.ffn.kernels.quantise import quantise_rows

    with torch.cuda.device(x_MK.get_device()):
        return quantise_rows(x_MK.contiguous(), out=out)


define("quantise_rows", "(Tensor x_MK) -> (Tensor, Tensor)", _quantise_rows, empty_rows)


def fp8_linear(x_MK: Tensor, w: QuantisedRows, bias_N: Tensor | None) -> Tensor:
    """``x Wᵀ + bias``, (M, N), from a weight that is there in e4m3 alone; no gradient.

    Up to `MAX_DECODE_TOKENS` tokens are not quantised: a call takes as long as reading the weight.
    """
    if len(x_MK) > MAX_DECODE_TOKENS:
        return linear(x_MK, w, bias_N, quantised_rows)
    if torch.compiler.is_compiling():
        y_MN: Tensor = torch.ops.sparsellm.fp8_linear_of_few(x_MK, *w, bias_N)
        return y_MN
    return _linear_of_few(x_MK, *w, bias_N)


def _linear_of_few(
    x_MK: Tensor, values_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Tensor:
    rows = QuantisedRows(values_NK, scale_N)
    if not x_MK.is_cuda:
        return linear_of_few(x_MK, rows, bias_N)
    from sparsellm.ffn.kernels.linear import quantised_linear

    with torch.cuda.device(x_MK.get_device()):
        return quantised_linear(x_MK.contiguous(), rows, bias_N)


define(
    "fp8_linear_of_few",
    "(Tensor x_MK, Tensor values_NK, Tensor scale_N, Tensor? bias_N) -> Tensor",
    _linear_of_few,
    lambda x_MK, values_NK, *_: x_MK.new_empty(len(x_MK), len(values_NK)),
)


def unsupported(device: torch.device) -> str | None:
    """Why this device cannot compute in FP8, or None; a CPU emulates it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    return f"{described(device)} has no FP8, which requires 8.9 (Ada)"
