"""Launches the TwELL kernels (``cuda/common/twell.cuh`` has the format) on torch tensors.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.formats import BACKUP_SHARE
from sparsellm.ffn.kernels import tensor_map
from sparsellm.ffn.kernels.compile import grid_size, launch_for
from sparsellm.ffn.kernels.gpu_architecture import PORTABLE, architecture_of
from sparsellm.ffn.types import TILE_NEURONS, FFNWeights

# cuda/common/walk.cuh, rows_gemm.cuh
_ROWS_EACH = 4
_SUM_COLUMNS = 512  # sum_columns: of a warp
_L2_BYTES = 26 * 2**20
GEMM_ROWS, _GEMM_BLOCKS = 128, 2
_PACK_ROWS = 8  # cuda/sm80/pack_twell.cu: of a tile, a block of threads


@dataclass(frozen=True)
class Twell:
    """An activation matrix of M × N in TwELL."""

    word: Tensor  # (M, tiles, 256 / compression) int32
    overflowed: Tensor  # (M,) int32: rows that a kernel left to `dense_rows`
    control: Tensor  # (8,) int32


def empty_twell(num_tokens: int, num_neurons: int, compression: int, device: torch.device) -> Twell:
    """Uninitialised memory for so many tokens."""
    tiles = -(-num_neurons // TILE_NEURONS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Twell(
        word=empty(num_tokens, tiles, TILE_NEURONS // compression),
        overflowed=empty(num_tokens),
        control=empty(8),
    )


def gate_twell(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, threshold: float, out: Twell
) -> None:
    """``out`` ← relu(x Wᵀ + bias); what is not above ``threshold`` counts as zero."""
    (m, k), n = x_MK.shape, w_NK.shape[0]
    architecture = architecture_of(x_MK.get_device())
    if not architecture.makes_gate:
        pack_twell(F.linear(x_MK, w_NK, bias_N), threshold, out)
        return
    gate = architecture.gate_twell
    _, tiles, width = out.word.shape
    pairs = -(-m // 256) * tiles  # of tiles, one for a cluster of two blocks
    launch_for(
        gate.stem,
        x_MK,
        grid_size(gate.stem, x_MK, 2 * pairs) // 2 * 2,
        tensor_map.encode(x_MK.data_ptr(), m, k, 128),
        tensor_map.encode(w_NK.data_ptr(), n, k, 128),
        *(bias_N, np.int32(m), np.int32(n), np.int32(k), np.float32(threshold)),
        *(np.int32(width), out.word, out.control),
    )


def pack_twell(gate_MN: Tensor, threshold: float, out: Twell) -> None:
    """``out`` ← relu(gate), of a dense gate; what is not above ``threshold`` counts as zero."""
    (m, n), (_, tiles, width) = gate_MN.shape, out.word.shape
    launch_for(
        PORTABLE.gate_twell.stem,
        gate_MN,
        -(-m * tiles // _PACK_ROWS),
        *(gate_MN, np.float32(threshold), np.int32(m), np.int32(n)),
        *(np.int32(width), out.word, out.control),
    )


def twell_ffn(  # noqa: PLR0917
    gate: Twell, x_MK: Tensor, w: FFNWeights, down_NK: Tensor, y_MK: Tensor, observed: int = 0
) -> None:
    """``y`` ← (gate * (x W_u + b_u)) W_d + b_d, or gate W_d + b_d without a gate of its own.

    Args:
        gate: as `gate_twell` leaves it; its values become those of h.
        x_MK: the tokens.
        w: the FFN; its W_d is not read.
        down_NK: W_d transposed.
        y_MK: what is filled.
        observed: address of an int32, pinned, for the mean non-zeros of a row; 0 for none.
    """
    m, k = x_MK.shape
    _, tiles, width = gate.word.shape
    second, b_second = (None, None) if w.gate_NK is None else (w.up_NK, w.b_up_N)
    for part in (1, 2) if second is not None else (2,):
        slices = 1 if part == 1 else column_slices(down_NK)
        launch_for(
            "twell_ffn",
            x_MK,
            -(-m // _ROWS_EACH) * slices,
            *(np.int32(part), x_MK, gate.word, np.int32(width), np.int32(tiles)),
            *(np.int32(_ROWS_EACH), second, b_second, down_NK, w.b_down_K, np.int32(m)),
            *(np.int32(k), np.int32(slices), np.int32(w.relu_up)),
            *(gate.control, gate.overflowed, observed, y_MK),
        )
    dense_rows(gate, x_MK, w, down_NK, y_MK)


def column_slices(*weights: Tensor) -> int:
    """In how many slices of its columns a sum of rows of ``weights``, each (N, K), is computed.

    L2 then holds a slice of all of them. Rows of 4 KiB at random come at 9.1 TB/s from 22 MiB, at
    6.5 TB/s from 44 MiB (H200).
    """
    size = sum(matrix.numel() * matrix.element_size() for matrix in weights)
    return min(-(-size // _L2_BYTES), -(-weights[0].shape[1] // _SUM_COLUMNS))


class KeptRows(NamedTuple):
    """What training keeps of the rows of `dense_rows`, and the statistics, which it completes."""

    gate: Tensor | None  # (R, N): of the first rows
    up: Tensor  # (R, N)
    token_M: Tensor | None  # (M,) int32: y is by token
    nnz_M: Tensor  # (M,) int32, complete
    fired_N: Tensor  # (N,) int32
    fired_bits: Tensor  # (blocks, N / 32) int32
    union_sum: Tensor  # () int64


def dense_rows(  # noqa: PLR0917
    gate: Twell,
    x_MK: Tensor,
    w: FFNWeights,
    down_NK: Tensor,
    y_MK: Tensor,
    kept: KeptRows | None = None,
) -> Tensor | None:
    """Computes the rows of ``y`` that overflowed TwELL; the host need not know how many they are.

    Returns:
        With ``kept`` parts of Σ|h|, fp32, to be added up.
    """
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    gated = w.gate_NK is not None
    first, b_first = (w.gate_NK, w.b_gate_N) if gated else (w.up_NK, w.b_up_N)
    second, b_second = (w.up_NK, w.b_up_N) if gated else (None, None)
    room = -(-m // (BACKUP_SHARE * GEMM_ROWS)) * GEMM_ROWS
    h, l1, backup_rows = x_MK.new_empty(room, n), None, 0
    if kept is not None:
        tiles = -(-n // (64 if gated else 128))
        l1 = torch.zeros(-(-m // GEMM_ROWS) * tiles * 8, device=x_MK.device)
        backup_rows = len(kept.up)
    launch_for(
        "dense_rows",
        x_MK,
        grid_size("dense_rows", x_MK, -(-n // 64) * -(-m // GEMM_ROWS), _GEMM_BLOCKS),
        *(x_MK, first, b_first, second, b_second, down_NK, w.b_down_K),
        *(np.float32(w.threshold), np.int32(w.relu_up), np.int32(n), np.int32(k)),
        *(gate.overflowed, gate.control, np.int32(room), h),
        *(None if kept is None else kept.token_M, y_MK),
        *(_NOTHING_KEPT if kept is None else (kept.gate, kept.up, np.int32(backup_rows), l1)),
        *((None,) * 3 if kept is None else (kept.fired_N, kept.fired_bits, kept.union_sum)),
    )
    return l1


_NOTHING_KEPT = (None, None, np.int32(0), None)
