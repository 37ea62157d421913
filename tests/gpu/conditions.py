"""What GPU tests need, and memory in which shows what a kernel fails to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


def need_kernels(oldest: tuple[int, int] = AMPERE) -> None:
    """Skips, by name, where the kernels cannot run."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if torch.cuda.get_device_capability() < oldest:
        pytest.skip(f"the kernels need compute capability {oldest[0]}.{oldest[1]} or newer")


def need_hopper() -> None:
    """Skips, by name, where Hopper's own kernels cannot run: a newer GPU cannot either."""
    need_kernels(HOPPER)
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("these kernels are for Hopper GPUs alone")


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives, inside operators too, is NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
