"""GPU memory of a call in MiB, beyond what was allocated before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MIB = 2**20


class StepMemory(NamedTuple):
    """Memory of one forward and backward, MiB."""

    held: float  # kept from forward to backward, without the outputs
    peak: float  # peak: outputs, kept tensors, scratch memory, gradients


def of_step(
    forward: Callable[[], tuple[Tensor, ...]], backward: Callable[[tuple[Tensor, ...]], object]
) -> StepMemory:
    """Runs forward and backward once; both must be warm."""
    before = _begin()
    outputs = forward()
    held = torch.cuda.memory_allocated() - before - sum(output.nbytes for output in outputs)
    gradients = backward(outputs)
    peak = torch.cuda.max_memory_allocated() - before
    del gradients  # kept alive until here: they are part of the peak
    return StepMemory(held / _MIB, peak / _MIB)


def peak_mib(call: Callable[[], object]) -> float:
    """The peak memory of a call."""
    before = _begin()
    call()
    return (torch.cuda.max_memory_allocated() - before) / _MIB


def _begin() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
