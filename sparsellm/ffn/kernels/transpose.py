"""Transposes weights and their gradients; rows, columns: any matrix."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import exported_like, launch_for

_TAKEN = {
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
}


def transposed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose, contiguous and in ``dtype``; by PyTorch where the kernel cannot."""
    out = matrix.new_empty(matrix.shape[::-1], dtype=dtype)
    if not _is_taken(matrix, dtype):
        return out.copy_(matrix.t())
    rows, columns = matrix.shape
    tile_rows, row_bytes = (exported_like("transpose", of, matrix) for of in ("rows", "row_bytes"))
    launch_for(
        "transpose",
        matrix,
        -(-rows // tile_rows) * -(-columns * out.itemsize // row_bytes),
        *(matrix, out, np.int32(rows), np.int32(columns)),
        *(np.int32(matrix.dtype == torch.float32), np.int32(dtype == torch.float32)),
    )
    return out


def _is_taken(matrix: Tensor, dtype: torch.dtype) -> bool:
    return (
        matrix.is_cuda
        and (matrix.dtype, dtype) in _TAKEN
        and matrix.is_contiguous()
        and matrix.numel() > 0
        and all(size % 8 == 0 for size in matrix.shape)
        and matrix.data_ptr() % 16 == 0  # a load
    )
