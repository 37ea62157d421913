"""Times of several configurations, each of which keeps the device busy for seconds before it is
timed.

A GPU lowers its clocks within a second of load, so bursts of calls are faster than the same calls
in a training step. Here a configuration runs alone, call after call, for a stretch of seconds whose
first third is not timed; stretches of the configurations alternate, so that a GPU that warms up
meets all alike. Power and clock are those of the timed parts, read through NVML (nvidia-ml-py).
"""

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
from numpy.typing import NDArray

Call = Callable[[], object]

STRETCHES = 3  # of each configuration
WARM_SHARE = 0.5  # warm-up before the timed part of a stretch, as a share of that part
CHUNK_MS = 10.0  # of a chunk: the calls between two readings of the device's clock
CHUNKS_AHEAD = 2  # are queued while earlier ones run, so that the device never waits for the host
MIN_CHUNKS = 3  # are timed in a stretch, however long they take


class Configuration(NamedTuple):
    """One implementation of what is compared.

    The stages are run one after the other and timed apart, such as forward and backward. Within a
    chunk each stage is run several times before the next one begins, as over a model's layers.
    """

    stages: Mapping[str, Call]
    calls: int = 1  # calls of the operation in one run of a stage
    most_at_once: int = 1000  # runs of a stage before the next stage begins
    charged_ms: float = 0.0  # cost of a call that was measured apart; part of the first stage


class Timing(NamedTuple):
    """The time of one call of a configuration, and power and clock of the GPU meanwhile."""

    stages: dict[str, NDArray[np.float64]]  # milliseconds, chunk by chunk
    watts: float | None = None  # None where NVML does not count energy
    sm_mhz: float | None = None

    @property
    def ms(self) -> NDArray[np.float64]:
        """Milliseconds of all stages together, chunk by chunk."""
        return np.sum(list(self.stages.values()), axis=0)


def spread(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, dict[str, float]]:
    """The median, and the 10th and 90th percentile as a record has them."""
    median, p10, p90 = (float(value) for value in np.percentile(values, [50, 10, 90]))
    return median, {"p10": p10, "p90": p90}


class Reading(NamedTuple):
    """What NVML has counted of GPUs at a moment."""

    at: float  # seconds, or the step of a training
    millijoules: int  # since the driver was loaded
    sm_mhz: float  # present clock of the multiprocessors


@functools.cache
def counters(device: torch.device) -> Callable[[float], Reading] | None:
    """Returns a function that reads the GPU's counters; its argument is the time of the reading.

    Returns None on a CPU, and, with one line on why, where NVML is missing or counts no energy.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def read(at: float) -> Reading:
            energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            return Reading(at, energy, pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

        read(0.0)
        return read
    except ImportError:
        why = "NVML is missing: pip install nvidia-ml-py (part of sparsellm[cuda])"
    except pynvml.NVMLError as error:
        why = f"NVML does not count energy here ({error})"
    print(f"power and clocks are not recorded: {why}", file=sys.stderr, flush=True)
    return None


def power(stretches: Sequence[Sequence[Reading]]) -> float | None:
    """Mean watts over stretches of work, which are read every few ten milliseconds.

    The counter moves less often than it is read, so that a stretch counts from its first movement
    to its last one. None if it moved less than twice in every stretch.
    """
    seconds, millijoules = 0.0, 0
    for readings in stretches:
        pairs = itertools.pairwise(readings)
        moves = [after for before, after in pairs if after.millijoules != before.millijoules]
        if len(moves) > 1:
            seconds += moves[-1].at - moves[0].at
            millijoules += moves[-1].millijoules - moves[0].millijoules
    return millijoules / seconds / 1e3 if seconds else None


def sustained(
    configurations: Mapping[str, Configuration], device: torch.device, seconds: float
) -> dict[str, Timing]:
    """Times every configuration for about ``seconds``, and keeps the device warm with it for half
    as many.

    Calls must be warm. On a CPU they are timed by the wall clock.
    """
    runs = {name: _runs(configuration, device) for name, configuration in configurations.items()}
    chunks: dict[str, list[list[float]]] = {name: [] for name in configurations}
    readings: dict[str, list[list[Reading]]] = {name: [] for name in configurations}
    for _ in range(STRETCHES):
        for name, configuration in configurations.items():
            timed, read = _stretch(configuration, runs[name], device, seconds / STRETCHES)
            chunks[name] += timed
            readings[name].append(read)
    return {
        name: _timing(configuration, chunks[name], readings[name])
        for name, configuration in configurations.items()
    }


def _timing(
    configuration: Configuration, chunks: list[list[float]], stretches: Sequence[Sequence[Reading]]
) -> Timing:
    stages = dict(zip(configuration.stages, np.array(chunks).T, strict=True))
    stages[next(iter(stages))] += configuration.charged_ms
    clocks = [reading.sm_mhz for readings in stretches for reading in readings]
    return Timing(stages, power(stretches), statistics.median(clocks) if clocks else None)


def _runs(configuration: Configuration, device: torch.device) -> int:
    """How often each stage is run in a chunk."""
    ms = min(sum(_between(_chunk(configuration, 1, device))) for _ in range(2))
    return min(max(round(CHUNK_MS / max(ms, 1e-6)), 1), configuration.most_at_once)


def _stretch(
    configuration: Configuration, runs: int, device: torch.device, seconds: float
) -> tuple[list[list[float]], list[Reading]]:
    """Milliseconds of a call in each stage, for each timed chunk, and readings meanwhile."""
    queued: deque[list[Any]] = deque()
    timed: list[list[Any]] = []
    readings = []
    read = counters(device)
    began = time.perf_counter()
    while len(timed) < MIN_CHUNKS or time.perf_counter() - began < (1 + WARM_SHARE) * seconds:
        is_timed = time.perf_counter() - began >= WARM_SHARE * seconds
        queued.append(_chunk(configuration, runs, device))
        if is_timed:
            timed.append(queued[-1])
            if read is not None:
                readings.append(read(time.perf_counter()))
        if len(queued) > CHUNKS_AHEAD:
            _wait(queued.popleft()[-1])
    _wait(queued[-1][-1])
    chunks = [[ms / (runs * configuration.calls) for ms in _between(marks)] for marks in timed]
    return chunks, readings


def _chunk(configuration: Configuration, runs: int, device: torch.device) -> list[Any]:
    """Runs each stage ``runs`` times; returns marks before, between and after the stages."""
    marks = [_mark(device)]
    for stage in configuration.stages.values():
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
