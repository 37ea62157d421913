"""Launches the kernels of GPUs other than Hopper; they run on every one since Ampere.

Same signatures, formats and results as `kernels.union` and `kernels.twell`, which see. M tokens,
K hidden_size, N intermediate_size; everything bf16 and contiguous.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.kernels.compile import launch_for, workers
from sparsellm.ffn.kernels.twell import Twell
from sparsellm.ffn.kernels.union import Union, union_entries

_THREADS = 256
_PACK_ROWS = 8  # cuda/sm80/pack_twell.cu: of a tile, a block of threads
_UNIT_COLUMNS = 256  # cuda/sm80/portable.cuh: unit_width
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
    launch_for(
        "pack_union",
        gate_MN,
        out.count.numel(),
        _THREADS,
        *(gate_MN, np.float32(threshold), np.int32(m), np.int32(n)),
        *(out.count, out.neuron, out.value, out.control),
    )
    union_entries(out, observed)


def gate_twell(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, threshold: float, out: Twell
) -> None:
    """``out`` ← relu(x Wᵀ + bias), by way of a dense matrix."""
    pack_twell(F.linear(x_MK, w_NK, bias_N), threshold, out)


def pack_twell(gate_MN: Tensor, threshold: float, out: Twell) -> None:
    """``out`` ← relu(gate); what is not above ``threshold`` counts as zero, NaN passes."""
    (m, n), (_, tiles, width) = gate_MN.shape, out.word.shape
    launch_for(
        "pack_twell",
        gate_MN,
        -(-m * tiles // _PACK_ROWS),
        _THREADS,
        *(gate_MN, np.float32(threshold), np.int32(m), np.int32(n)),
        *(np.int32(width), out.word, out.control),
    )


def union_up(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, gate: Union, *, relu_up: bool = False
) -> None:
    """``gate`` ← gate * (x Wᵀ + bias), in place; with ``relu_up`` gate * relu(x Wᵀ + bias)."""
    m, k = x_MK.shape
    launch_for(
        "portable_up",
        x_MK,
        workers("portable_up", x_MK, gate.unit.shape[0], _BLOCKS_PER_MULTIPROCESSOR),
        _THREADS,
        *(x_MK, w_NK, bias_N, np.int32(m), np.int32(k), np.int32(gate.count.shape[1])),
        *(gate.entry, gate.unit, gate.control, gate.value, np.int32(relu_up)),
    )


def union_down(
    h: Union, w_NK: Tensor, bias_K: Tensor | None, y_MK: Tensor, token_M: Tensor | None = None
) -> None:
    """``y`` ← h W + bias, as `kernels.union.union_down`; of a union without splits."""
    assert h.splits is None
    (m, k), units = y_MK.shape, h.total.shape[0] * -(-y_MK.shape[1] // _UNIT_COLUMNS)
    launch_for(
        "portable_down",
        y_MK,
        workers("portable_down", y_MK, units, _BLOCKS_PER_MULTIPROCESSOR),
        _THREADS,
        *(w_NK, bias_K, np.int32(m), np.int32(k), np.int32(h.count.shape[1])),
        *(h.entry, h.order, h.control, h.value, token_M, y_MK),
    )
