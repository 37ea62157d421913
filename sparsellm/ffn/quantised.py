"""Matrices in e4m3 numbers with one scale per row: the specification, in plain torch.

An e4m3 number has 3 bits of mantissa: its relative rounding error is at most 1/16, for magnitudes
from 2^-6 to 448. A row is scaled so that its largest magnitude is 448: numbers down to a 28,672th
of that are rounded no worse, and an outlier in one row does not affect the others.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # of a row of zeros


class QuantisedRows(NamedTuple):
    """A matrix of M rows and K columns, ``values * scale``."""

    values_MK: Tensor  # (M, K) e4m3
    scale_M: Tensor  # (M,) fp32


def quantised_from(values_MK: Tensor | None, scale_M: Tensor | None) -> QuantisedRows | None:
    """The rows that two arguments of an operator stand for; None if they are None."""
    return None if values_MK is None or scale_M is None else QuantisedRows(values_MK, scale_M)


def empty_rows(x_MK: Tensor, row_M: Tensor | None = None) -> QuantisedRows:
    """Uninitialised memory for what `rows_in_e4m3` computes."""
    # Not `len`, which would make compiled code one for this number of rows alone.
    num_rows = x_MK.shape[0] if row_M is None else row_M.shape[0]
    values_MK = x_MK.new_empty(num_rows, x_MK.shape[1], dtype=E4M3)
    return QuantisedRows(values_MK, x_MK.new_empty(num_rows, dtype=torch.float32))


def rows_in_e4m3(x_MK: Tensor) -> QuantisedRows:
    """What `fp8.quantised_rows` computes."""
    x_MK = x_MK.float()
    largest_M = x_MK.abs().amax(1)
    scale_M = torch.where(largest_M.isfinite(), largest_M / LARGEST, torch.nan)
    scale_M = scale_M.clamp(min=SMALLEST_SCALE)
    return QuantisedRows((x_MK * scale_M.reciprocal()[:, None]).to(E4M3), scale_M)


def dequantised(rows: QuantisedRows) -> Tensor:
    """(M, K) fp32: the numbers that the rows stand for."""
    return rows.values_MK.float() * rows.scale_M[:, None]


def fp32_product(x_MK: Tensor, w: QuantisedRows, dtype: torch.dtype) -> Tensor:
    """``x Wᵀ``, (M, N), summed in fp32; autocast would first round each number to bf16."""
    with torch.autocast(x_MK.device.type, enabled=False):
        return F.linear(x_MK.float(), dequantised(w)).to(dtype)


def scaled_product(
    x: QuantisedRows, w: QuantisedRows, dtype: torch.dtype, *, fast_accumulation: bool = True
) -> Tensor:
    """``x Wᵀ``, (M, N): by the FP8 tensor cores of a GPU, elsewhere in fp32.

    With fast accumulation, tensor cores keep about 13 bits of a sum; without, partial sums are
    added in fp32. Elsewhere both are the same.

    On a GPU fp16 results are rounded to bf16 first: PyTorch's kernel for scales per row writes bf16
    numbers whatever it is asked for (torch 2.11 on Ada and Blackwell, and on Hopper with CUDA
    before 12.9), so that 1.0 would read as 1.875. e4m3 numbers have less precision than bf16.
    """
    if not x.values_MK.is_cuda:
        return fp32_product(dequantised(x), w, dtype)
    product: Tensor = torch._scaled_mm(
        x.values_MK,
        w.values_MK.t(),
        scale_a=x.scale_M.unsqueeze(1),
        scale_b=w.scale_M.unsqueeze(0),
        out_dtype=torch.bfloat16 if dtype == torch.float16 else dtype,
        use_fast_accum=fast_accumulation,
    )
    return product.to(dtype)


def linear_of_few(x_MK: Tensor, w: QuantisedRows, bias_N: Tensor | None) -> Tensor:
    """``x Wᵀ + bias``, (M, N), of tokens that are not quantised."""
    y_MN = fp32_product(x_MK, w, x_MK.dtype)
    return y_MN if bias_N is None else y_MN + bias_N


def linear(
    x_MK: Tensor,
    w_NK: Tensor | QuantisedRows,
    bias_N: Tensor | None,
    quantise: Callable[[Tensor], QuantisedRows] = rows_in_e4m3,
) -> Tensor:
    """``x Wᵀ + bias``, in FP8 where the weight is; its result has the type of x."""
    if not isinstance(w_NK, QuantisedRows):
        return F.linear(x_MK, w_NK, bias_N)
    y_MN = scaled_product(quantise(x_MK), w_NK, x_MK.dtype)
    return y_MN if bias_N is None else y_MN + bias_N
