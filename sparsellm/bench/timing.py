"""Times of several sides, each of which keeps the device busy for seconds before it is timed.

A GPU lowers its clocks within a second of load, so bursts of calls are faster than the same calls
in a training step. Here a side runs alone, call after call, for a stretch of seconds whose first
third is not timed; stretches of the sides alternate, so that a GPU that warms up meets all alike.
Power and clock are those of the timed parts, read through NVML (nvidia-ml-py).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Call = Callable[[], object]

STRETCHES = 3  # of each side
WARM_SHARE = 0.5  # of a stretch's timed part, before it
CHUNK_MS = 10.0  # calls between two readings of the device's clock
CHUNKS_AHEAD = 2  # queued while earlier ones run, so that the device never waits for the host
MIN_CHUNKS = 3  # of a stretch, however long they take


class Side(NamedTuple):
    """One implementation of what is compared.

    The stages are run one after the other and timed apart, such as forward and backward. Within a
    chunk each stage is run several times before the next one begins, as over a model's layers.
    """

    stages: Mapping[str, Call]
    calls: int = 1  # of the operation, that one run of a stage makes
    most_at_once: int = 1000  # runs of a stage before the next stage begins


class Spread(NamedTuple):
    """Median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    def plus(self, value: float) -> Spread:
        """Shifted."""
        return Spread(*(own + value for own in self))

    def over(self, value: float) -> Spread:
        """``value`` divided by each: a time becomes a rate."""
        return Spread(value / self.median, value / self.p90, value / self.p10)


class Timing(NamedTuple):
    """Milliseconds of one call of a side, and the GPU meanwhile."""

    ms: Spread
    stages: dict[str, Spread]
    watts: float | None  # None where NVML does not count energy
    sm_mhz: float | None

    def charged(self, ms: Mapping[str, float]) -> Timing:
        """With costs that were measured apart added to the stages."""
        stages = {name: own.plus(ms.get(name, 0.0)) for name, own in self.stages.items()}
        return self._replace(ms=self.ms.plus(sum(ms.values())), stages=stages)


class GPUCounters:
    """What NVML counts of one GPU.

    Raises:
        ValueError: NVML is missing, or this GPU has no energy counter.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ValueError(
                "NVML is missing: pip install nvidia-ml-py (part of sparsellm[cuda])"
            ) from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.millijoules()
            self.sm_mhz()
        except pynvml.NVMLError as error:
            raise ValueError(f"NVML does not count energy here ({error})") from error

    def millijoules(self) -> int:
        """Energy since the driver was loaded; the counter moves every few ten milliseconds."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def sm_mhz(self) -> int:
        """The present clock of the multiprocessors."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))


@functools.cache
def counters(device: torch.device) -> GPUCounters | None:
    """The GPU's counters; None on a CPU, and where there are none, which it says once."""
    if device.type != "cuda":
        return None
    try:
        return GPUCounters(device)
    except ValueError as error:
        print(f"power and clocks are not recorded: {error}", file=sys.stderr, flush=True)
        return None


class PowerMeter:
    """Mean power and median clock over one or several stretches of work.

    Within a stretch, power is measured from the first movement of the energy counter to the last
    one, each of which is noticed at the `sample` that follows it.
    """

    def __init__(self, counted: GPUCounters | None) -> None:
        self._counted = counted
        self._seen: int | None = None
        self._moves: list[tuple[float, int]] = []
        self._seconds, self._millijoules = 0.0, 0
        self._mhz: list[int] = []

    def sample(self) -> None:
        """Reads the counters; to be called every few ten milliseconds of a stretch."""
        if self._counted is None:
            return
        now, energy = time.perf_counter(), self._counted.millijoules()
        self._mhz.append(self._counted.sm_mhz())
        if self._seen not in (None, energy):
            self._moves.append((now, energy))
        self._seen = energy

    def end_stretch(self) -> None:
        """Ends a stretch; what the GPU uses until the next sample does not count."""
        if len(self._moves) > 1:
            (began, first), (ended, last) = self._moves[0], self._moves[-1]
            self._seconds += ended - began
            self._millijoules += last - first
        self._moves, self._seen = [], None

    @property
    def watts(self) -> float | None:
        """None if the counter moved less than twice in every stretch."""
        return self._millijoules / self._seconds / 1e3 if self._seconds else None

    @property
    def sm_mhz(self) -> float | None:
        """None without samples."""
        return statistics.median(self._mhz) if self._mhz else None


def sustained(sides: Mapping[str, Side], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Times every side for about ``seconds``, and keeps the device warm with it for half as many.

    Calls must be warm. On a CPU they are timed by the wall clock.
    """
    runs = {name: _runs(side, device) for name, side in sides.items()}
    chunks: dict[str, list[list[float]]] = {name: [] for name in sides}
    meters = {name: PowerMeter(counters(device)) for name in sides}
    for _ in range(STRETCHES):
        for name, side in sides.items():
            chunks[name] += _stretch(side, runs[name], device, seconds / STRETCHES, meters[name])
    return {name: _timing(side, chunks[name], meters[name]) for name, side in sides.items()}


def _timing(side: Side, chunks: list[list[float]], meter: PowerMeter) -> Timing:
    stages = {
        name: _spread([chunk[index] for chunk in chunks]) for index, name in enumerate(side.stages)
    }
    return Timing(_spread([sum(chunk) for chunk in chunks]), stages, meter.watts, meter.sm_mhz)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(*(float(v) for v in np.percentile(values, [50, 10, 90])))


def _runs(side: Side, device: torch.device) -> int:
    """How often each stage is run in a chunk."""
    ms = min(sum(_between(_chunk(side, 1, device))) for _ in range(2))
    return min(max(round(CHUNK_MS / max(ms, 1e-6)), 1), side.most_at_once)


def _stretch(
    side: Side, runs: int, device: torch.device, seconds: float, meter: PowerMeter
) -> list[list[float]]:
    """Milliseconds of a call in each stage, for each chunk of a stretch that is timed."""
    queued: deque[list[Any]] = deque()
    timed: list[list[Any]] = []
    began = time.perf_counter()
    while len(timed) < MIN_CHUNKS or time.perf_counter() - began < (1 + WARM_SHARE) * seconds:
        is_timed = time.perf_counter() - began >= WARM_SHARE * seconds
        queued.append(_chunk(side, runs, device))
        if is_timed:
            timed.append(queued[-1])
            meter.sample()
        if len(queued) > CHUNKS_AHEAD:
            _wait(queued.popleft()[-1])
    _wait(queued[-1][-1])
    meter.end_stretch()
    return [[ms / (runs * side.calls) for ms in _between(marks)] for marks in timed]


def _chunk(side: Side, runs: int, device: torch.device) -> list[Any]:
    """Runs each stage so often; the marks before, between and after the stages."""
    marks = [_mark(device)]
    for stage in side.stages.values():
        for _ in range(runs):
            stage()
        marks.append(_mark(device))
    return marks


def _mark(device: torch.device) -> Any:
    """A point in the device's work: an event on a GPU, seconds of the wall clock on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _wait(mark: Any) -> None:
    if not isinstance(mark, float):
        mark.synchronize()


def _between(marks: Sequence[Any]) -> list[float]:
    _wait(marks[-1])
    if isinstance(marks[0], float):
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def graph(calls: Sequence[Call]) -> Call:
    """Captures all calls, which must be warm, in one CUDA graph; returns the graph's replay."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    return captured.replay


def copies_beyond_cache(num_bytes: int, device: torch.device) -> int:
    """Number of copies, at least two, whose total size is over three times any L2 cache."""
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-3 * cache // num_bytes))
