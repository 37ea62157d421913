"""TwELL and the hybrid format of the paper (arXiv 2603.23198) in plain torch: the specification.

TwELL, tile-wise ELLPACK, keeps the non-zeros of an activation matrix row by row within tiles of 256
neurons. The hybrid format, for training, keeps rows with few non-zeros in an ELL matrix of fixed
width and the others in a dense backup.

M tokens, K hidden_size, N intermediate_size, T tiles; weights as `nn.Linear` stores them:
(out, in).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.types import TILE_NEURONS

COMPRESSIONS = (2, 4, 8)


def pack_twell(gate_MN: Tensor, compression: int) -> Tensor:
    """(M, T, 256 / C) int32: of each row of each tile how many non-zeros, then as many as fit.

    A non-zero is a bf16 value in the high half of a word and its neuron, of all N, in the low half;
    neurons ascend. A count above ``256 / C - 1`` says that the tile has overflowed. Words beyond
    the count are zero (kernels leave them as they were).

    Args:
        gate_MN: after its activation function; N at most 65,536.
        compression: C, of `COMPRESSIONS`.

    Raises:
        ValueError: another compression factor, too many neurons.
    """
    if compression not in COMPRESSIONS:
        raise ValueError(f"TwELL: compression {compression} must be one of {COMPRESSIONS}")
    m, n = gate_MN.shape
    if n > 1 << 16:
        raise ValueError(f"TwELL: {n:,} neurons are more than 16 bits can number")
    width, tiles = TILE_NEURONS // compression, -(-n // TILE_NEURONS)
    padded = F.pad(gate_MN, (0, tiles * TILE_NEURONS - n)).reshape(m, tiles, TILE_NEURONS)
    bits = padded.to(torch.bfloat16).view(torch.int16).long() << 16
    neuron = torch.arange(tiles * TILE_NEURONS, device=gate_MN.device).view(tiles, TILE_NEURONS)
    active = padded != 0
    # Non-zeros first, in the order of their neurons.
    order = (~active).long().argsort(dim=2, stable=True)[:, :, : width - 1]
    word = torch.where(active, bits | neuron, 0).gather(2, order)
    count = active.sum(2, keepdim=True)
    return _as_int32(torch.cat([count, word], 2))


def unpack_twell(word: Tensor, num_neurons: int) -> tuple[Tensor, Tensor]:
    """What TwELL holds: (M, N) values, bf16, and (M, T) counts of what it should hold."""
    m, _, width = word.shape
    count = word[:, :, 0].long()
    held = torch.arange(width - 1, device=word.device) < count[:, :, None]
    row, tile, slot = held.nonzero(as_tuple=True)
    stored = word[row, tile, slot + 1]
    gate_MN = torch.zeros(m, num_neurons, dtype=torch.bfloat16, device=word.device)
    value = (stored >> 16).to(torch.int16).view(torch.bfloat16)
    gate_MN[row, (stored & 0xFFFF).long()] = value
    return gate_MN, count


def twell_overflows(word: Tensor) -> Tensor:
    """(M,) bool: rows with a tile that holds more non-zeros than there are slots."""
    return (word[:, :, 0] >= word.shape[2]).any(1)


def _as_int32(words: Tensor) -> Tensor:
    """The low 32 bits, with their sign."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
