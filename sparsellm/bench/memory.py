"""GPU memory of a call, above what was allocated before it, in MiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MIB = 2**20


class StepMemory(NamedTuple):
    """Of one forward and backward, MiB."""

    held: float  # between the two, for the backward: the outputs themselves do not count
    peak: float  # at any moment: outputs, what is held, scratch, gradients


def of_step(
    forward: Callable[[], tuple[Tensor, ...]], backward: Callable[[tuple[Tensor, ...]], object]
) -> StepMemory:
    """Runs forward and backward once, which must be warm."""
    before = _begin()
    outputs = forward()
    held = torch.cuda.memory_allocated() - before - sum(output.nbytes for output in outputs)
    gradients = backward(outputs)
    peak = torch.cuda.max_memory_allocated() - before
    del gradients  # alive until here: they are part of the peak
    return StepMemory(held / _MIB, peak / _MIB)


def peak_mib(call: Callable[[], object]) -> float:
    """The most that a call has at any moment."""
    before = _begin()
    call()
    return (torch.cuda.max_memory_allocated() - before) / _MIB


def _begin() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
