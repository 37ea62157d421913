"""Transposes weights, their gradients and parts of symmetric matrices."""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import gpu_runs_kernels

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


def mirror_strip(matrices: Tensor, start: int, end: int) -> None:
    """Rows ``start`` to ``end`` of symmetric matrices, right of column ``end``, are copied below.

    Args:
        matrices: contiguous (matrices, size, size).
        start, end: multiples of 8, as the size is.
    """
    num_matrices, size, _ = matrices.shape
    if matrices.dtype != torch.bfloat16 or not _is_taken(matrices[0], torch.bfloat16):
        matrices[:, end:, start:end] = matrices[:, start:end, end:].mT
        return
    kernel = kernel_for("mirror_strip", matrices)
    tile_rows, row_bytes = kernel.exported("rows"), kernel.exported("row_bytes")
    tiles = -(-(end - start) // tile_rows) * -(-(size - end) * matrices.itemsize // row_bytes)
    if tiles > 0:
        kernel.launch(
            num_matrices * tiles,
            matrices=matrices,
            size=size,
            start=start,
            end=end,
            tiles_of_matrix=tiles,
        )


def _is_taken(matrix: Tensor, dtype: torch.dtype) -> bool:
    return (
        (matrix.dtype, dtype) in _TAKEN
        and gpu_runs_kernels(matrix)
        and matrix.is_contiguous()
        and matrix.numel() > 0
        and all(size % 8 == 0 for size in matrix.shape)
        and matrix.data_ptr() % 16 == 0  # a load
    )
