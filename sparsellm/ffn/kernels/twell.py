"""Launches the TwELL kernels (``cuda/common/twell.cuh`` has the format) on torch tensors.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.formats import TWELL_WIDTH
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.gate import compute_gate
from sparsellm.ffn.kernels.launch import Address, Kernel
from sparsellm.ffn.types import CONTROL_WORDS, DENSE_ROW_TILE, TILE_NEURONS, FFNWeights

_ROWS_EACH = 4  # of a block of threads, at most `max_rows` of cuda/common/walk.cuh
_L2_BYTES = 26 * 2**20
_ROUNDS = 8  # of `dense_rows`, if all rows overflow
_GATED_NEURONS = DENSE_ROW_TILE // 2  # of a dense tile: half of its columns are up's


@dataclass(frozen=True)
class Twell:
    """An activation matrix of M × N in TwELL."""

    word: Tensor  # (M, tiles, `TWELL_WIDTH`) int32
    overflowed: Tensor  # (M,) int32: rows that a kernel left to `dense_rows`
    control: Tensor  # (8,) int32


def empty_twell(num_tokens: int, num_neurons: int, device: torch.device) -> Twell:
    """Uninitialised memory for so many tokens."""
    empty = partial(torch.empty, dtype=torch.int32, device=device)
    word = empty_words(num_tokens, num_neurons, device)
    return Twell(word, overflowed=empty(num_tokens), control=empty(CONTROL_WORDS))


def empty_words(num_tokens: int, num_neurons: int, device: torch.device) -> Tensor:
    """`Twell.word`, uninitialised."""
    tiles = -(-num_neurons // TILE_NEURONS)
    return torch.empty(num_tokens, tiles, TWELL_WIDTH, dtype=torch.int32, device=device)


def gate_twell(x_MK: Tensor, w: FFNWeights, out: Twell) -> None:
    """`compute_gate` in TwELL."""
    compute_gate("twell", x_MK, w, {"word": out.word, "control": out.control})


def twell_ffn(gate: Twell, x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int = 0) -> None:
    """``y`` ← (gate * (x W_u + b_u)) W_d + b_d, or gate W_d + b_d without a gate of its own.

    Args:
        gate: as `gate_twell` leaves it; its values become those of h.
        x_MK: the tokens.
        w: the FFN; W_d is read transposed.
        y_MK: the output.
        observed: address of an int32, pinned, for the mean non-zeros of a row; 0 for none.
    """
    m, k = x_MK.shape
    rows = {"word": gate.word, "tiles_n": gate.word.shape[1], "rows_each": _ROWS_EACH}
    row_blocks = -(-m // _ROWS_EACH)
    if w.gate_NK is not None:
        kernel_for("twell_up", x_MK).launch(
            row_blocks,
            x_MK=x_MK,
            w_up_NK=w.up_NK,
            b_up_N=w.b_up_N,
            m=m,
            k=k,
            relu_up=w.relu_up,
            **rows,
        )
    down = kernel_for("twell_down", x_MK)
    slices = column_slices(down, w.down_NK)
    down.launch(
        row_blocks * slices,
        w_down_NK=w.down_NK,
        b_down_K=w.b_down_K,
        m=m,
        k=k,
        slices=slices,
        control=gate.control,
        overflowed=gate.overflowed,
        observed=Address(observed),
        y_MK=y_MK,
        **rows,
    )
    # Rows with a tile that overflowed have been left out so far.
    dense_rows(gate, x_MK, w, y_MK)


def column_slices(kernel: Kernel, *weights: Tensor | None) -> int:
    """The number of column slices in which a kernel sums rows of ``weights``, each (N, K).

    L2 then holds a slice of all of them. Random rows of 4 KiB are read at 9.1 TB/s from 22 MiB, at
    6.5 TB/s from 44 MiB (H200).
    """
    present = [matrix for matrix in weights if matrix is not None]
    size = sum(matrix.nbytes for matrix in present)
    return min(-(-size // _L2_BYTES), -(-present[0].shape[1] // kernel.exported("columns")))


def partial_sums(kernel: Kernel, like: Tensor) -> Tensor:
    """Memory for the parts into which `dense_rows` and its gradient split products of few rows."""
    return like.new_empty(kernel.exported("partial_sums"), dtype=torch.float32)


class KeptRows(NamedTuple):
    """What training keeps of the rows of `dense_rows`, and the statistics that these complete."""

    gate: Tensor | None  # (R, N): of the first rows
    up: Tensor  # (R, N)
    l1: Address  # `num_l1_parts` zeros, fp32
    active_N: Tensor  # (N,) int32
    active_bits: Tensor  # (blocks, N / 32) int32
    union_sum: Tensor  # () int64


def dense_rows(
    gate: Twell,
    x_MK: Tensor,
    w: FFNWeights,
    y_MK: Tensor,
    backup: KeptRows | None = None,
    *,
    token_M: Tensor | None = None,
) -> None:
    """Computes the rows of ``y`` that overflowed TwELL; the host need not know how many they are.

    ``token_M``: (M,) int32, the row of y that each row of x becomes; None where it is the same.
    """
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    room = -(-m // (_ROUNDS * DENSE_ROW_TILE)) * DENSE_ROW_TILE
    h, backup_rows = x_MK.new_empty(room, n), 0 if backup is None else len(backup.up)
    arrays = dict.fromkeys(KeptRows._fields) if backup is None else backup._asdict()
    kernel = kernel_for("dense_rows", x_MK, w.activation)
    kernel.launch_units(
        _row_tiles(m) * -(-n // _GATED_NEURONS),
        x_MK=x_MK,
        first_NK=w.first[0],
        b_first_N=w.first[1],
        second_NK=w.second[0],
        b_second_N=w.second[1],
        down_NK=w.down_NK,
        b_down_K=w.b_down_K,
        threshold=w.threshold,
        relu_up=w.relu_up,
        n=n,
        k=k,
        list=gate.overflowed,
        control=gate.control,
        room=room,
        h=h,
        partial=partial_sums(kernel, x_MK),
        token=token_M,
        y_MK=y_MK,
        backup=backup_rows,
        **arrays,
    )


def num_l1_parts(x_MK: Tensor, w: FFNWeights) -> int:
    """How many sums `dense_rows` adds to L1: one for each warp of a tile of activations."""
    kernel, n = kernel_for("dense_rows", x_MK, w.activation), w.up_NK.shape[0]
    neurons = DENSE_ROW_TILE if w.gate_NK is None else _GATED_NEURONS
    return _row_tiles(len(x_MK)) * -(-n // neurons) * (kernel.threads // 32)


def _row_tiles(num_tokens: int) -> int:
    return -(-num_tokens // DENSE_ROW_TILE)
