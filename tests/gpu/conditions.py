"""What GPU tests need, and memory in which shows what a kernel fails to write."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsellm.ffn import costs
from sparsellm.ffn.kernels.compiler import gpu_architecture
from sparsellm.ffn.kernels.compiler.gpu_architecture import FORCED, architecture_of


def each(cases: Sequence[Any]) -> Callable[[Callable[..., None]], pytest.MarkDecorator]:
    """Runs a test with each case as ``case``: large ones apart, ten small ones in one test.

    A case begins with its sizes. What fails is named in the error's notes.
    """
    large = [case for case in cases if _size(case) > 2**31]
    small = [case for case in cases if case not in large]
    batches = [[case] for case in large] + [small[at : at + 10] for at in range(0, len(small), 10)]

    def decorate(test: Callable[..., None]) -> pytest.MarkDecorator:
        @functools.wraps(test)
        def run(*, batch: list[Any], **fixtures: Any) -> None:
            for case in batch:
                with named(case):
                    test(case=case, **fixtures)

        signature = inspect.signature(test)
        parameters = [
            p.replace(name="batch" if p.name == "case" else p.name, kind=p.KEYWORD_ONLY)
            for p in signature.parameters.values()
        ]
        run.__signature__ = signature.replace(parameters=parameters)  # what pytest passes
        ids = [str(b[0]) if len(b) == 1 else f"{b[0]} and {len(b) - 1} more" for b in batches]
        return pytest.mark.parametrize("batch", batches, ids=ids)(run)

    return decorate


def _size(case: Sequence[Any]) -> int:
    return math.prod(size for size in case[:3] if isinstance(size, int))


@contextmanager
def named(*case: object) -> Iterator[None]:
    """An error within says for which case it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {', '.join(map(str, case))}")
        raise


def need_kernels() -> None:
    """Skips, by name, where the kernels cannot run."""
    if reason := why_no_kernels():
        pytest.skip(reason)


def why_no_kernels() -> str | None:
    """Why the kernels cannot run here, or None."""
    return gpu_architecture.why_no_kernels(torch.device("cuda", torch.cuda.current_device()))


def relative(actual: torch.Tensor, right: torch.Tensor) -> float:
    """The error over the size of what is right, both over all elements, in float64."""
    right = right.double()
    return float((actual.double() - right).norm() / right.norm().clamp(min=1e-30))


def may_go_either_way(
    gate_MN: torch.Tensor, threshold: float, element: torch.dtype
) -> torch.Tensor:
    """Which gates, exact, meet the threshold or not by the order in which fp32 sums are formed."""
    # A sum of some thousand products of about 2 in all, each addition cut off at 2^-23.
    slack = 3e-5
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
    for function in (architecture_of, costs.measure_costs, costs.measure_training_costs):
        function.cache_clear()


@contextmanager
def asked_of(module: ModuleType) -> Iterator[list[str]]:
    """The names of the kernels for which a module asks within, in order."""
    names: list[str] = []
    kernel_for = module.kernel_for

    def recorded(name: str, like: torch.Tensor) -> Any:
        names.append(name)
        return kernel_for(name, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "kernel_for", recorded)
        yield names


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives, inside operators too, is NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
