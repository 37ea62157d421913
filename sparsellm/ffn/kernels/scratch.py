"""Memory that only the kernels of one call use: one allocation, in which every array has its place.

Allocating and releasing a tensor costs the host several microseconds, as much as a launch, and a
call has a dozen such arrays. The kernels take their addresses.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.launch import Address

_ALIGNMENT = 512  # bytes, as torch aligns its allocations


class Array(NamedTuple):
    """An array of a `ScratchLayout`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32


class ScratchLayout:
    """Where each array lies; the same for all calls of a shape, so that it is computed once."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays
        self.offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name, (shape, dtype) in arrays.items():
            self.offsets[name] = self.num_bytes
            size = math.prod(shape) * dtype.itemsize
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT


class Scratch:
    """The arrays of a layout, uninitialised or, by `torch.zeros`, zero.

    The memory is released with this object, which must outlive the launches that use it.
    """

    def __init__(
        self,
        layout: ScratchLayout,
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.layout = layout
        self.memory = allocate(layout.num_bytes // 4, dtype=torch.int32, device=device)
        self._start = self.memory.data_ptr()

    def __call__(self, *names: str) -> dict[str, Address]:
        """The addresses of these arrays, as a launch takes them: by name."""
        start, offsets = self._start, self.layout.offsets
        return {name: Address(start + offsets[name]) for name in names}

    def __getitem__(self, name: str) -> Address:
        """The address of an array."""
        return Address(self._start + self.layout.offsets[name])

    def tensor(self, name: str) -> Tensor:
        """An array as a tensor, for code other than kernels."""
        shape, dtype = self.layout.arrays[name]
        start = self.layout.offsets[name]
        size = math.prod(shape) * dtype.itemsize
        return self.memory.view(torch.uint8)[start : start + size].view(dtype).view(shape)
