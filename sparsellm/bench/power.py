"""A GPU's energy counter and clock, read through NVML (nvidia-ml-py)."""

import functools
import statistics
import sys
import time
from typing import Any

import torch


class GPUCounters:
    """What NVML counts of one GPU.

    Args:
        device: a CUDA device.

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
