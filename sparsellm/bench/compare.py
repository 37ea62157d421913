"""Compares a side with dense on the same inputs: checks its results, times both, makes records."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Side, Spread, Timing, sustained

WARM_UP_RUNS = 25  # by then the choice between dense and sparse kernels is made


class Comparison(NamedTuple):
    """One case of a benchmark: two sides with their inputs, their results, what to record."""

    bench: str
    case: dict[str, Any]
    dense: Side  # the baseline
    ours: Side
    tokens: int  # of a call
    # Each result of ours by its name, and what it must be; called once both sides are warm.
    results: Callable[[], Iterable[tuple[str, Tensor, Tensor]]]
    most_off: float  # the largest difference of a result, relative to its norm, that is no error
    mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode
    as_rate: bool = False  # whether to record tokens per ms instead of ms
    charged: Mapping[str, float] = {}  # ms of costs outside the sides, by stage of ours
    outcome: Callable[[], dict[str, Any]] = dict  # keys of the case that timing decides
    more: Callable[[dict[str, Any]], list[Measurement]] = lambda case: []  # further records


def compare(given: Comparison, device: torch.device, seconds: float) -> list[Measurement]:
    """Warms both sides up and times each for ``seconds``; every ratio is better above 1.

    Returns:
        ``ms`` (or ``tokens_per_ms``), that of each stage if there are several, ``mJ_per_token``
        where NVML counts energy, and ``difference``.

    Raises:
        ValueError: the result of ours is wrong.
    """
    with given.mode():
        for side in (given.dense, given.ours):
            warm_up(side, device)
        difference = max(checked_difference(*result, given.most_off) for result in given.results())
        times = sustained({"dense": given.dense, "ours": given.ours}, device, seconds)
    dense, ours = times["dense"], times["ours"].charged(given.charged)
    case = given.case | given.outcome()

    def against(metric: str, unit: str, value: Spread, baseline: Spread) -> Measurement:
        ratio = baseline.median / value.median
        return Measurement(
            given.bench,
            case,
            metric,
            value.median,
            unit,
            baseline.median,
            1 / ratio if unit == "tokens/ms" else ratio,
            sustained=_conditions(value, ours, seconds),
            baseline_sustained=_conditions(baseline, dense, seconds),
        )

    if given.as_rate:
        rates = (side.ms.over(given.tokens) for side in (ours, dense))
        found = [against("tokens_per_ms", "tokens/ms", *rates)]
    else:
        found = [against("ms", "ms", ours.ms, dense.ms)]
    if len(ours.stages) > 1:
        found += [
            against(f"{name}_ms", "ms", stage, dense.stages[name])
            for name, stage in ours.stages.items()
        ]
    if ours.watts and dense.watts:  # W · ms = mJ
        mj, base = (side.watts * side.ms.median / given.tokens for side in (ours, dense))  # type: ignore[operator]
        found.append(Measurement(given.bench, case, "mJ_per_token", mj, "mJ", base, base / mj))
    unit = "relative to dense"
    found.append(Measurement(given.bench, case, "difference", difference, unit))
    return [*found, *given.more(case)]


def _conditions(spread: Spread, side: Timing, seconds: float) -> dict[str, float]:
    """How a value was sustained: its spread over chunks of a stretch, and the GPU meanwhile."""
    found = {"p10": spread.p10, "p90": spread.p90, "watts": side.watts, "sm_mhz": side.sm_mhz}
    return {name: own for name, own in found.items() if own is not None} | {"seconds": seconds}


def warm_up(side: Side, device: torch.device) -> None:
    """Runs a side alone; what it measures of itself has reached the host before the next run."""
    for _ in range(WARM_UP_RUNS):
        for stage in side.stages.values():
            stage()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def gpu(bench: str) -> torch.device:
    """The current CUDA device.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"bench {bench} measures GPU kernels and needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def checked_difference(what: str, found: Tensor, expected: Tensor, most: float) -> float:
    """`relative_difference`; raises ValueError if it is NaN or exceeds ``most``."""
    difference = relative_difference(found, expected)
    if not difference <= most:
        raise ValueError(
            f"{what} differs from dense by {difference:.1%}; wrong results are not timed"
        )
    return difference


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of ``expected``, in fp32."""
    error = (found.float() - expected.float()).norm()
    return float(error / expected.float().norm().clamp(min=1e-30))
