"""The formats of an activation pattern, in plain torch: the specification of their kernels.

TwELL, tile-wise ELLPACK, and the hybrid format are those of the paper (arXiv 2603.23198). TwELL
keeps the non-zeros of an activation matrix row by row within tiles of 256 neurons. The hybrid
format, for training, keeps rows with few non-zeros in an ELL matrix of fixed width and the others
in a dense backup. The columns of the union format are in reference.py.

`FORMATS` are those in which training keeps a pattern from forward to backward. The operators of
training_ops.py know a format only by its `TrainingFormat`.

M tokens, K hidden_size, N intermediate_size, T tiles; weights as `nn.Linear` stores them:
(out, in).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn import reference
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    CONTROL_WORDS,
    DENSE_ROW_TILE,
    MAX_ELL_WIDTH,
    TILE_NEURONS,
    BackwardInputs,
    Columns,
    FFNStats,
    FFNWeights,
    Format,
    MatrixGradients,
    Room,
)

# Words per row of a tile: a compression factor of 8, as the paper uses at its sparsity.
TWELL_WIDTH = TILE_NEURONS // 8
# About as many as TwELL holds before a tile overflows. The paper has 128, and a backup of M / 8:
# of 16,384 tokens, 70 to 1,198 of a pilot layer have more than 128, and at most 44 more than 512.
ELL_WIDTH = 512
BACKUP_SHARE = 16  # the dense backup has M / 16 rows
ROUND_ROWS = 1024  # dense rows computed per round


def backup_rows_for(num_tokens: int) -> int:
    """Rows of the dense backup, rounded up to whole rounds of dense products."""
    rows = -(-num_tokens // BACKUP_SHARE)
    unit = DENSE_ROW_TILE if rows <= ROUND_ROWS else ROUND_ROWS
    return -(-rows // unit) * unit


def pack_twell(gate_MN: Tensor) -> Tensor:
    """(M, T, 32) int32: for each row and tile the number of non-zeros, then those that fit.

    A non-zero is a bf16 value in the high half of a word and its neuron, of all N, in the low half;
    neurons ascend. A count above 31 says that the tile has overflowed. Words beyond the count are
    zero (kernels leave them as they were).

    Args:
        gate_MN: after its activation function; N at most 65,536.

    Raises:
        ValueError: too many neurons.
    """
    m, n = gate_MN.shape
    if n > 1 << 16:
        raise ValueError(f"TwELL: {n:,} neurons are more than 16 bits can number")
    tiles = -(-n // TILE_NEURONS)
    padded = F.pad(gate_MN, (0, tiles * TILE_NEURONS - n)).reshape(m, tiles, TILE_NEURONS)
    bits = padded.to(torch.bfloat16).view(torch.int16).long() << 16
    neuron = torch.arange(tiles * TILE_NEURONS, device=gate_MN.device).view(tiles, TILE_NEURONS)
    active = padded != 0
    # Non-zeros first, in the order of their neurons.
    order = (~active).long().argsort(dim=2, stable=True)[:, :, : TWELL_WIDTH - 1]
    word = torch.where(active, bits | neuron, 0).gather(2, order)
    count = active.sum(2, keepdim=True)
    return _as_int32(torch.cat([count, word], 2))


def twell_overflows(word: Tensor) -> Tensor:
    """(M,) bool: rows with a tile that holds more non-zeros than there are slots."""
    return (word[:, :, 0] >= word.shape[2]).any(1)


class Hybrid(NamedTuple):
    """The activation pattern of x's rows, as training keeps it; ``cuda/common/hybrid.cuh``.

    A row lies in the ELL matrix if it has at most W non-zeros and none of its tiles overflowed in
    TwELL. All others are heavy; the dense backup keeps the first R of them.
    """

    word: Tensor  # (M, W) int32: gate and neuron of each non-zero, as in TwELL; without W_g h
    length: Tensor  # (M,) int32: how many of a row's words are filled; 0 for a heavy row
    heavy: Tensor  # (2 · blocks,) int32: bit r % 32 of word r / 32: row r is heavy
    row: Tensor  # (M,) int32: the heavy rows, ascending; the rest is not filled
    # (8,) int32: the first is the number of heavy rows; the last two, as one of 64 bits, say how
    # many of them the backup has no room for.
    counted: Tensor
    # (M, W), the values of `word`, which rounds them to bf16; (0, W) where x is bf16.
    gate: Tensor
    up: Tensor  # (M, W), x W_u at the non-zeros; (0, W) without W_g
    backup_gate: Tensor  # (R, N), dense; (0, N) without W_g
    backup_up: Tensor  # (R, N); without W_g h
    table: Tensor  # (blocks, N) uint8: for how many of a block's ELL rows a neuron is active

    @property
    def num_heavy(self) -> int:
        """Rows that are not in the ELL matrix; waits for the GPU."""
        return int(self.counted[0])

    @property
    def recomputed(self) -> Tensor:
        """() int64: rows that the backup has no room for, see `FFNStats`."""
        return self.counted.view(torch.int64)[-1]


def empty_hybrid(x_MK: Tensor, num_neurons: int, room: Room, *, gated: bool) -> Hybrid:
    """Uninitialised memory for the pattern of these tokens; x's type is that of activations."""
    m, n, (backup_rows, width) = x_MK.shape[0], num_neurons, room
    blocks = (m + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    ints = partial(x_MK.new_empty, dtype=torch.int32)
    return Hybrid(
        word=ints(m, width),
        length=ints(m),
        heavy=ints(2 * blocks),
        row=ints(m),
        counted=ints(CONTROL_WORDS),
        gate=x_MK.new_empty(0 if x_MK.dtype == torch.bfloat16 else m, width),
        up=x_MK.new_empty(m if gated else 0, width),
        backup_gate=x_MK.new_empty(backup_rows if gated else 0, n),
        backup_up=x_MK.new_empty(backup_rows, n),
        table=x_MK.new_empty(blocks, n, dtype=torch.uint8),
    )


def hybrid_of(gate_MN: Tensor | None, up_MN: Tensor, room: Room) -> Hybrid:
    """The hybrid format of a gate after its relu, and of up at its non-zeros.

    Args:
        gate_MN: None without a gate; the pattern is then that of ``up_MN``, after its relu.
        up_MN: x W_u.
        room: R and W.
    """
    backup_rows, width = room
    pattern_MN = up_MN if gate_MN is None else gate_MN
    (m, n), device = pattern_MN.shape, up_MN.device
    active_MN = pattern_MN != 0
    # Which rows the ELL matrix holds: all others are heavy.
    heavy_M = twell_overflows(pack_twell(pattern_MN)) | (active_MN.sum(1) > width)
    light_MN = active_MN & ~heavy_M[:, None]
    count = light_MN.sum(1)
    # A stable sort puts the active neurons of a light row first, in ascending order.
    order = (~light_MN).long().argsort(dim=1, stable=True)[:, :width]
    order = F.pad(order, (0, width - order.shape[1]))
    held = torch.arange(width, device=device) < count[:, None]
    # A word: the value in bf16 above, the neuron's number below.
    bits = pattern_MN.to(torch.bfloat16).view(torch.int16).long() << 16
    word = torch.where(held, bits.gather(1, order) & 0xFFFF_0000 | order, 0)
    # Heavy rows: as bits, as a list, and the first of them dense.
    heavy_rows = heavy_M.nonzero().flatten()
    heavy = F.pad(heavy_M.long(), (0, -m % BLOCK_TOKENS)).view(-1, 32)
    row = F.pad(heavy_rows, (0, m - len(heavy_rows)))
    counted = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device)
    counted[0], counted[-2] = len(heavy_rows), max(len(heavy_rows) - backup_rows, 0)
    backup_row = heavy_rows[:backup_rows]

    def backup(values_MN: Tensor) -> Tensor:
        return F.pad(values_MN[backup_row], (0, 0, 0, backup_rows - len(backup_row)))

    def on_pattern(values_MN: Tensor) -> Tensor:
        return torch.where(held, values_MN.gather(1, order), 0)

    return Hybrid(
        word=_as_int32(word),
        length=count.int(),
        heavy=_as_int32((heavy << torch.arange(32, device=device)).sum(1)),
        row=row.int(),
        counted=counted,
        gate=up_MN.new_empty(0, width) if up_MN.dtype == torch.bfloat16 else on_pattern(pattern_MN),
        up=up_MN.new_empty(0, width) if gate_MN is None else on_pattern(up_MN),
        backup_gate=up_MN.new_empty(0, n) if gate_MN is None else backup(gate_MN),
        backup_up=backup(up_MN),
        table=reference.blocks_of(light_MN).sum(1).to(torch.uint8),
    )


def on_neurons(values_MW: Tensor, saved: Hybrid, num_neurons: int) -> Tensor:
    """The dense (M, N) matrix of the values in the ELL matrix."""
    width = saved.word.shape[1]
    held = torch.arange(width, device=values_MW.device) < saved.length[:, None]
    row, slot = held.nonzero(as_tuple=True)
    values_MN = values_MW.new_zeros(len(values_MW), num_neurons)
    values_MN[row, (saved.word[row, slot] & 0xFFFF).long()] = values_MW[row, slot]
    return values_MN


def activations_in(saved: Hybrid, x_MK: Tensor, w: FFNWeights) -> tuple[Tensor | None, Tensor]:
    """`reference.activations` from the hybrid format, dense; zero where the gate is zero.

    Rows that the backup had no room for are computed again from x.
    """
    n, heavy_rows = len(w.up_NK), saved.row[: saved.num_heavy].long()
    stored_rows, recomputed_rows = heavy_rows.tensor_split([len(saved.backup_up)])
    again = reference.activations(x_MK[recomputed_rows], w)
    stored_MW = saved.gate
    if not len(stored_MW):
        stored_MW = (saved.word >> 16).to(torch.int16).view(torch.bfloat16).to(x_MK.dtype)

    def whole(ell_MW: Tensor, backup: Tensor, computed: Tensor | None) -> Tensor:
        assert computed is not None
        values_MN = on_neurons(ell_MW, saved, n)
        values_MN[stored_rows], values_MN[recomputed_rows] = backup[: len(stored_rows)], computed
        return values_MN

    if w.gate_NK is None:
        return None, whole(stored_MW, saved.backup_up, again[1])
    gate_MN = whole(stored_MW, saved.backup_gate, again[0])
    return gate_MN, whole(saved.up, saved.backup_up, again[1])


def _as_int32(words: Tensor) -> Tensor:
    """The low 32 bits, with their sign."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass(frozen=True)
class TrainingFormat:
    """What differs between formats, and training in plain torch: the specification of kernels.

    y, statistics and gradients are those of the dense FFN whatever overflows.
    """

    saved: type[Columns] | type[Hybrid]  # what forward keeps for backward
    empty: Callable[..., Any]  # allocates it for (x, N, room, gated)
    check: Callable[[int, int, Room], None]  # that the room fits M and N
    keep: Callable[[Tensor | None, Tensor, Room], Any]  # makes it from `reference.activations`
    restore: Callable[[Any, Tensor, FFNWeights], tuple[Tensor | None, Tensor]]  # from it, x and w
    kernels: str  # the module of kernels/ with forward and backward

    def forward(
        self, x_MK: Tensor, w: FFNWeights, room: Room, token_M: Tensor | None = None
    ) -> tuple[Tensor, FFNStats, Any]:
        """y (M, K), statistics, and the input of `backward` (paper, section on training).

        Args:
            x_MK: the tokens; everything is computed in their type.
            w: of the same type, without biases; its threshold is not read.
            room: what is reserved for the pattern.
            token_M: see `reference.output_of`.
        """
        gate_MN, up_MN = reference.activations(x_MK, w)
        y_MK, stats = reference.output_of(gate_MN, up_MN, w, token_M)
        return y_MK, stats, self.keep(gate_MN, up_MN, room)

    def backward(self, inputs: BackwardInputs, out: MatrixGradients, *, adds: bool) -> Tensor:
        """`reference.gradients_on` the pattern; what did not fit is recomputed from x.

        The matrices' gradients are written to ``out``, or added to it.

        Returns:
            ∇x, in the order of the rows of x.
        """
        dy_MK, d_l1, x_MK, w, saved, token_M = inputs
        dy_MK = dy_MK if token_M is None else dy_MK[token_M]
        gate_MN, up_MN = self.restore(saved, x_MK, w)
        gradients = reference.gradients_on(gate_MN, up_MN, dy_MK, d_l1, x_MK, w)
        dx_MK, d_gate_NK, d_up_NK, d_down_KN = gradients
        for memory, gradient in zip(out, (d_gate_NK, d_up_NK, d_down_KN.t()), strict=True):
            if memory is not None and gradient is not None:
                (memory.add_ if adds else memory.copy_)(gradient)
        return dx_MK


def _check_columns(num_tokens: int, num_neurons: int, room: Room) -> None:
    worst = -(-num_tokens // BLOCK_TOKENS) * num_neurons
    if not 0 <= room.capacity <= worst + 1:  # `Capacity` begins with the maximum
        raise ValueError(
            f"sparse_ffn: capacity {room.capacity:,} must be 0 to {worst:,} (blocks × N)"
        )
    if worst >= 2**31:
        raise ValueError(
            f"sparse_ffn: {num_tokens:,} tokens × {num_neurons:,} neurons are over 2³¹ columns"
        )


def _check_hybrid(num_tokens: int, num_neurons: int, room: Room) -> None:
    width = room.ell_width
    if not 1 <= width <= MAX_ELL_WIDTH or num_tokens * width >= 2**31:
        raise ValueError(
            f"sparse_ffn: an ELL matrix of {num_tokens:,} × {width:,}: the width must be 1 to "
            f"{MAX_ELL_WIDTH:,}, and the product under 2³¹"
        )


FORMATS: dict[Format, TrainingFormat] = {
    "union": TrainingFormat(
        saved=Columns,
        empty=reference.empty_columns,
        check=_check_columns,
        keep=lambda gate_MN, up_MN, room: reference.columns_of(gate_MN, up_MN, room.capacity),
        restore=reference.activations_in,
        kernels="union_training",
    ),
    "twell": TrainingFormat(
        saved=Hybrid,
        empty=empty_hybrid,
        check=_check_hybrid,
        keep=hybrid_of,
        restore=activations_in,
        kernels="hybrid",
    ),
}
