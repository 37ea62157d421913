"""Launches ``cuda/common/quantise_rows.cu``."""

from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.quantised import QuantisedRows, empty_rows


def quantise_rows(
    x_MK: Tensor, row_M: Tensor | None = None, out: QuantisedRows | None = None
) -> QuantisedRows:
    """See `fp8.quantised_rows`; with ``out`` the result is written there.

    Args:
        x_MK: bf16 or fp16, contiguous; its columns are a multiple of 8.
        row_M: (M,) int32, the row of x that becomes each row of the result; None: the same.
        out: memory for the result.
    """
    out = empty_rows(x_MK, row_M) if out is None else out
    (num_rows, k), kernel = out.values_MK.shape, kernel_for("quantise_rows", x_MK)
    grid = -(-num_rows // (kernel.threads // 32))  # a warp makes a row
    kernel.launch(
        grid, x_MK=x_MK, row_M=row_M, m=num_rows, k=k, values_MK=out.values_MK, scale_M=out.scale_M
    )
    return out
