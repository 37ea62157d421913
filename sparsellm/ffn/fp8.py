"""Quantising rows to e4m3 as an operator: on a GPU by one kernel, elsewhere in plain torch."""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.gpu_architecture import described
from sparsellm.ffn.operators import define
from sparsellm.ffn.quantised import QuantisedRows, empty_rows, rows_in_e4m3


def quantised_rows(x_MK: Tensor) -> QuantisedRows:
    """Each row in e4m3 with the scale that makes its largest magnitude 448.

    A row with NaN or infinity becomes NaN, as every product with it would be. No gradient.
    """
    return QuantisedRows(*torch.ops.sparsellm.quantise_rows(x_MK.detach()))


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


def unsupported(device: torch.device) -> str | None:
    """Why this device cannot compute in FP8, or None; a CPU emulates it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    return f"{described(device)} has no FP8, which requires 8.9 (Ada)"
