"""Launches ``cuda/common/quantise_rows.cu``."""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.quantised import E4M3, QuantisedRows


def quantise_rows(
    x_MK: Tensor, row_M: Tensor | None = None, out: QuantisedRows | None = None
) -> QuantisedRows:
    """See `fp8.quantised_rows`; with ``out`` the result is written there.

    ``x_MK`` is bf16 or fp16, contiguous, and its columns are a multiple of 8.
    """
    num_rows, k = len(x_MK) if row_M is None else len(row_M), x_MK.shape[1]
    if out is None:
        out = QuantisedRows(
            torch.empty(num_rows, k, dtype=E4M3, device=x_MK.device),
            torch.empty(num_rows, dtype=torch.float32, device=x_MK.device),
        )
    kernel = kernel_for("quantise_rows", x_MK)
    grid = -(-num_rows // (kernel.threads // 32))  # a warp makes a row
    kernel.launch(grid, x_MK, row_M, num_rows, k, *out)
    return out
