"""Compares a configuration with dense on the same inputs: checks its results, and times both."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Configuration, Timing, spread, sustained

Values = NDArray[np.float64]  # chunk by chunk
WARM_UP_RUNS = 25  # by then the choice between dense and sparse kernels has been made


def compare(
    bench: str,
    case: dict[str, Any],
    dense: Configuration,
    ours: Configuration,
    *,
    tokens: int,
    results: Callable[[], Iterable[tuple[str, Tensor, Tensor]]],
    most_off: float,
    device: torch.device,
    seconds: float,
    mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
    as_throughput: bool = False,
) -> list[Measurement]:
    """Warms both configurations up and times each for ``seconds``; every ratio is better above 1.

    Args:
        bench: name of the benchmark.
        case: the keys of all records.
        dense: the baseline.
        ours: what is compared with it.
        tokens: number of tokens of a call.
        results: gives each result of ours after its name and before what it must be; called once
            both configurations are warm.
        most_off: the largest difference of a result, relative to its norm, that is not an error.
        device: where both compute.
        seconds: how long each configuration is timed.
        mode: context in which both run.
        as_throughput: whether to record tokens per ms instead of ms.

    Returns:
        ``ms`` (or ``tokens_per_ms``), the same of each stage if there are several,
        ``mJ_per_token`` where NVML counts energy, and ``difference``.

    Raises:
        ValueError: a result of ours is wrong.
    """
    with mode():
        for configuration in (dense, ours):
            warm_up(configuration, device)
        difference = _largest_difference(results(), most_off)
        timings = sustained({"dense": dense, "ours": ours}, device, seconds)
    return [
        *_speeds(bench, case, timings, tokens=tokens, seconds=seconds, as_throughput=as_throughput),
        *_energy(bench, case, timings, tokens),
        Measurement(bench, case, "difference", difference, "relative to dense"),
    ]


def _largest_difference(results: Iterable[tuple[str, Tensor, Tensor]], most_off: float) -> float:
    """The largest relative difference between a result and what it must be.

    Raises:
        ValueError: one is larger than ``most_off``, or is NaN.
    """
    difference = 0.0
    for name, result, expected in results:
        error = (result.float() - expected.float()).norm()
        off = float(error / expected.float().norm().clamp(min=1e-30))
        if not off <= most_off:  # NaN too
            raise ValueError(f"{name} differs from dense by {off:.1%}; wrong results are not timed")
        difference = max(difference, off)
    return difference


def _speeds(
    bench: str,
    case: dict[str, Any],
    timings: dict[str, Timing],
    *,
    tokens: int,
    seconds: float,
    as_throughput: bool,
) -> list[Measurement]:
    """The time of a call, or its throughput; and the time of each stage, if there are several."""
    ours, dense = timings["ours"], timings["dense"]

    def against(metric: str, unit: str, values: Values, baselines: Values) -> Measurement:
        value, under = _median(values, ours, seconds)
        baseline, base_under = _median(baselines, dense, seconds)
        ratio = value / baseline if unit == "tokens/ms" else baseline / value
        return Measurement(bench, case, metric, value, unit, baseline, ratio, under, base_under)

    if as_throughput:
        whole = against("tokens_per_ms", "tokens/ms", tokens / ours.ms, tokens / dense.ms)
    else:
        whole = against("ms", "ms", ours.ms, dense.ms)
    if len(ours.stages) == 1:
        return [whole]
    stages = ours.stages.items()
    return [whole, *(against(f"{name}_ms", "ms", ms, dense.stages[name]) for name, ms in stages)]


def _energy(
    bench: str, case: dict[str, Any], timings: dict[str, Timing], tokens: int
) -> list[Measurement]:
    """Energy per token, where NVML counts it."""
    ours, dense = timings["ours"], timings["dense"]
    if not (ours.watts and dense.watts):
        return []
    value = ours.watts * float(np.median(ours.ms)) / tokens  # W · ms = mJ
    baseline = dense.watts * float(np.median(dense.ms)) / tokens
    return [Measurement(bench, case, "mJ_per_token", value, "mJ", baseline, baseline / value)]


def _median(
    values: Values, configuration: Timing, seconds: float
) -> tuple[float, dict[str, float]]:
    """The median, and how it was sustained: its spread, and power and clock of the GPU."""
    median, conditions = spread(values)
    for name, reading in (("watts", configuration.watts), ("sm_mhz", configuration.sm_mhz)):
        if reading is not None:
            conditions[name] = reading
    return median, conditions | {"seconds": seconds}


def warm_up(configuration: Configuration, device: torch.device) -> None:
    """Runs it alone, and waits after each run: what it measures of itself is then known."""
    for _ in range(WARM_UP_RUNS):
        for stage in configuration.stages.values():
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
