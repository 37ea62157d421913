"""Keys and values in memory of a fixed size, at fixed addresses, as a CUDA graph needs them.

Shapes: M sequences, G heads of keys, P positions (the capacity), D numbers of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """The keys and values of one layer."""

    keys_MGPD: Tensor
    values_MGPD: Tensor


class Positions:
    """The positions of each sequence's new token; they lie on the device and change there.

    The sequences end at the same slot of the cache, and padding lies before their first tokens.
    """

    def __init__(self, position_M: Tensor, first_M: Tensor, slot: int, rotary: tuple[Tensor, ...]):
        self.position_M, self.first_M = position_M.int(), first_M.int()  # for RoPE; not padding
        self.slot = torch.full((1,), slot, dtype=torch.int32, device=position_M.device)
        self.cos_PD, self.sin_PD = rotary  # by position
        self._scratch: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def advance(self) -> None:
        """To the next token."""
        self.position_M += 1
        self.slot += 1

    def scratch_for(self, num_heads: int, splits: int, size: int) -> tuple[Tensor, Tensor]:
        """Memory that ``decode_attention`` needs; layers use it one after the other."""
        key = (num_heads, splits, size)
        if key not in self._scratch:
            like, rows = self.slot, num_heads * splits
            partial = like.new_empty((rows, 2 + size), dtype=torch.float32)
            self._scratch[key] = partial, like.new_zeros(num_heads)
        return self._scratch[key]
