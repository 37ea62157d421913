"""Rows of a matrix in another order (``cuda/common/permute_rows.cu``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import launch_for, threads_of


def permuted_rows(x_MK: Tensor, token_M: Tensor) -> Tensor:
    """``x[token_M]``; x of `ELEMENTS` and contiguous, K a multiple of 8, token_M (M,) int32."""
    m, k = x_MK.shape
    out = torch.empty_like(x_MK)
    arguments = (x_MK, token_M, np.int32(m), np.int32(k), out)
    rows = threads_of("permute_rows", x_MK) // 32  # a warp copies one
    launch_for("permute_rows", x_MK, -(-m // rows), *arguments)
    return out
