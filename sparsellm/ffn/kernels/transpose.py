"""Transposes weights and their gradients; rows, columns: any matrix."""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for

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
    (rows, columns), kernel = matrix.shape, kernel_for("transpose", matrix)
    tile_rows, row_bytes = kernel.exported("rows"), kernel.exported("row_bytes")
    grid = -(-rows // tile_rows) * -(-columns * out.itemsize // row_bytes)
    kernel.launch(
        grid,
        matrix=matrix,
        out=out,
        rows=rows,
        columns=columns,
        from_float=matrix.dtype == torch.float32,
        to_float=dtype == torch.float32,
    )
    return out


def _is_taken(matrix: Tensor, dtype: torch.dtype) -> bool:
    return (
        (matrix.dtype, dtype) in _TAKEN
        and matrix.is_contiguous()
        and matrix.numel() > 0
        and all(size % 8 == 0 for size in matrix.shape)
        and matrix.data_ptr() % 16 == 0  # a load
    )
