"""Keys and values in memory of a fixed size, at fixed addresses, as a CUDA graph needs them.

Shapes: M sequences, G heads of keys, P positions (the capacity), D numbers of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class LayerCache(NamedTuple):
    """The keys and values of one layer."""

    keys_MGPD: Tensor
    values_MGPD: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], like: Tensor) -> "LayerCache":
        """Zeros: a masked position that is NaN would still make the sum over positions NaN."""
        return cls(like.new_zeros(shape), like.new_zeros(shape))


class FixedLayer(DynamicLayer):
    """A layer of transformers' cache whose keys and values are the first ones of a `LayerCache`.

    The prompt's forward fills it. Attention sees no position past the last one, so that it needs no
    mask without padding.
    """

    def __init__(self, memory: LayerCache) -> None:
        super().__init__()
        self._memory = memory
        self.lazy_initialization(*memory)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called by transformers before the first update, too."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values; returns all that there are."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self._memory.keys_MGPD[:, :, start:end] = key_states
        self._memory.values_MGPD[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def _show(self, end: int) -> None:
        keys, values = self._memory
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]


class Positions:
    """Where the new token of each sequence is; all of it lies on the device and changes there.

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
