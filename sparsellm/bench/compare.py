"""Compares a side with dense on the same inputs: checks its results, times both, makes records."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Side, Spread, Timing, sustained

WARM_UP_RUNS = 25  # by then the choice between dense and sparse kernels is made


def compare(
    bench: str,
    case: dict[str, Any],
    dense: Side,
    ours: Side,
    *,
    tokens: int,
    results: Callable[[], Iterable[tuple[str, Tensor, Tensor]]],
    most_off: float,
    device: torch.device,
    seconds: float,
    mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
    as_rate: bool = False,
) -> list[Measurement]:
    """Warms both sides up and times each for ``seconds``; every ratio is better above 1.

    Args:
        bench: name of the benchmark.
        case: keys of the records.
        dense: the baseline.
        ours: what is compared with it.
        tokens: of a call.
        results: each result of ours by its name, and what it must be; called once both are warm.
        most_off: the largest difference of a result, relative to its norm, that is no error.
        device: where both compute.
        seconds: for which each side is timed.
        mode: context in which both run.
        as_rate: whether to record tokens per ms instead of ms.

    Returns:
        ``ms`` (or ``tokens_per_ms``), that of each stage if there are several, ``mJ_per_token``
        where NVML counts energy, and ``difference``.

    Raises:
        ValueError: a result of ours is wrong.
    """
    with mode():
        for side in (dense, ours):
            warm_up(side, device)
        difference = max(_difference(*result, most_off) for result in results())
        times = sustained({"dense": dense, "ours": ours}, device, seconds)
    own, base = times["ours"], times["dense"]

    def against(metric: str, unit: str, value: Spread, baseline: Spread) -> Measurement:
        ratio = baseline.median / value.median
        return Measurement(
            bench,
            case,
            metric,
            value.median,
            unit,
            baseline.median,
            1 / ratio if unit == "tokens/ms" else ratio,
            sustained=_conditions(value, own, seconds),
            baseline_sustained=_conditions(baseline, base, seconds),
        )

    if as_rate:
        rates = (time.ms.as_rate(tokens) for time in (own, base))
        found = [against("tokens_per_ms", "tokens/ms", *rates)]
    else:
        found = [against("ms", "ms", own.ms, base.ms)]
    if len(own.stages) > 1:
        found += [
            against(f"{name}_ms", "ms", stage, base.stages[name])
            for name, stage in own.stages.items()
        ]
    if own.watts and base.watts:  # W · ms = mJ
        mj, of_dense = own.watts * own.ms.median / tokens, base.watts * base.ms.median / tokens
        found.append(Measurement(bench, case, "mJ_per_token", mj, "mJ", of_dense, of_dense / mj))
    return [*found, Measurement(bench, case, "difference", difference, "relative to dense")]


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


def _difference(what: str, found: Tensor, expected: Tensor, most: float) -> float:
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
