"""What GPU tests need, and memory in which shows what a kernel fails to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from sparsellm.ffn import training_costs
from sparsellm.ffn.kernels import inference
from sparsellm.ffn.kernels.gpu_architecture import FORCED, architecture_of, unsupported


def need_kernels() -> None:
    """Skips, by name, where the kernels cannot run."""
    if reason := why_no_kernels():
        pytest.skip(reason)


def why_no_kernels() -> str | None:
    """Why the kernels cannot run here, or None."""
    if find_spec("cupy") is None:
        return "CuPy is not installed"
    return unsupported(torch.cuda.current_device())


def may_go_either_way(
    gate_MN: torch.Tensor, threshold: float, element: torch.dtype
) -> torch.Tensor:
    """Which gates, exact, meet the threshold or not by the order in which fp32 sums are formed."""
    slack = (
        3e-5  # a sum of some thousand products of about 2 in all, each addition cut off at 2^-23
    )
    above, below = ((gate_MN + sign * slack).to(element) <= threshold for sign in (1, -1))
    return above != below


@contextmanager
def forced(architecture: str) -> Iterator[None]:
    """Runs the kernels of one architecture, by name, whichever the GPU would choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORCED, architecture)
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Makes the next call choose, and measure, anew."""
    for function in (architecture_of, inference.measure_costs, training_costs.measure_costs):
        function.cache_clear()


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives, inside operators too, is NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
