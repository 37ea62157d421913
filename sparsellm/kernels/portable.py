"""Launches the union kernels of GPUs other than Hopper; they run on every one since Ampere.

Same signatures, formats and results as `kernels.union`, which see. M tokens, K hidden_size,
N intermediate_size; everything bf16 and contiguous.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from sparsellm.kernels.compile import load_for, pointer
from sparsellm.kernels.union import Union, union_entries

_THREADS = 256
_UNIT_COLUMNS = 256  # cuda/portable.cuh: unit_width
_BLOCKS_PER_MULTIPROCESSOR = 2  # where shared memory has room; the others find nothing left to do


def gate_union(  # noqa: PLR0917
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    threshold: float,
    out: Union,
    observed: int = 0,
) -> None:
    """``out`` ← relu(x Wᵀ + bias), by way of a dense matrix."""
    pack_union(F.linear(x_MK, w_NK, bias_N), threshold, out, observed)


def pack_union(gate_MN: Tensor, threshold: float, out: Union, observed: int = 0) -> None:
    """``out`` ← relu(gate); what is not above ``threshold`` counts as zero, NaN passes."""
    m, n = gate_MN.shape
    kernel, stream = load_for("pack_union", gate_MN)
    kernel.launch(
        out.count.numel(),
        _THREADS,
        (
            gate_MN.data_ptr(),
            np.float32(threshold),
            np.int32(m),
            np.int32(n),
            out.count.data_ptr(),
            out.neuron.data_ptr(),
            out.value.data_ptr(),
            out.control.data_ptr(),
        ),
        stream,
    )
    union_entries(out, observed)


def union_up(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, gate: Union) -> None:
    """``gate`` ← gate * (x Wᵀ + bias), in place."""
    m, k = x_MK.shape
    kernel, stream = load_for("portable_up", x_MK)
    kernel.launch(
        min(kernel.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR, gate.unit.shape[0]),
        _THREADS,
        (
            x_MK.data_ptr(),
            w_NK.data_ptr(),
            pointer(bias_N),
            np.int32(m),
            np.int32(k),
            np.int32(gate.count.shape[1]),
            gate.entry.data_ptr(),
            gate.unit.data_ptr(),
            gate.control.data_ptr(),
            gate.value.data_ptr(),
        ),
        stream,
    )


def union_down(h: Union, w_NK: Tensor, bias_K: Tensor | None, y_MK: Tensor) -> None:
    """``y`` ← h W + bias, the weight neuron by neuron: ``down_proj.weight`` transposed."""
    m, k = y_MK.shape
    kernel, stream = load_for("portable_down", y_MK)
    units = h.total.shape[0] * -(-k // _UNIT_COLUMNS)
    kernel.launch(
        min(kernel.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR, units),
        _THREADS,
        (
            w_NK.data_ptr(),
            pointer(bias_K),
            np.int32(m),
            np.int32(k),
            np.int32(h.count.shape[1]),
            h.entry.data_ptr(),
            h.order.data_ptr(),
            h.control.data_ptr(),
            h.value.data_ptr(),
            y_MK.data_ptr(),
        ),
        stream,
    )
