"""Energy of a call in millijoules, from the GPU's energy counter (NVML)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], object]
BLOCKS = 2  # per side; the sides alternate
CHUNK_MS = 10.0  # duration of the calls between two readings


class EnergyCounter:
    """The total energy that a GPU has used since its driver was loaded.

    Args:
        device: a CUDA device.

    Raises:
        ValueError: NVML is missing, or the GPU has no energy counter.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ValueError(
                "--energy reads the GPU's counter through NVML: pip install nvidia-ml-py "
                "(part of sparsellm[cuda])"
            ) from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.read()
        except pynvml.NVMLError as error:
            raise ValueError(f"--energy: NVML has no energy counter here ({error})") from error

    def read(self) -> int:
        """The counter, in millijoules."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


def per_call(
    sides: Mapping[str, Call],
    ms: Mapping[str, float],
    read: Callable[[], int],
    synchronize: Callable[[], None],
    seconds: float = 1.0,
) -> dict[str, float]:
    """Millijoules of one call of each side, while the GPU runs that side alone.

    The counter is updated only every few ten milliseconds: a block is measured from one update to a
    later one.

    Args:
        sides: the calls, by name.
        ms: approximate duration of a call of each side.
        read: returns the counter in mJ.
        synchronize: waits for the device.
        seconds: duration per side, split into blocks that alternate with those of the others.

    Raises:
        ValueError: the counter did not change.
    """
    used, made = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0)
    for _ in range(BLOCKS):
        for name, call in sides.items():
            chunk = max(1, round(CHUNK_MS / ms[name]))
            millijoules, calls = _block(call, chunk, read, synchronize, seconds / BLOCKS)
            used[name] += millijoules
            made[name] += calls
    return {name: used[name] / made[name] for name in sides}


def _block(
    call: Call,
    chunk: int,
    read: Callable[[], int],
    synchronize: Callable[[], None],
    seconds: float,
) -> tuple[int, int]:
    """Millijoules and calls between the counter's first and last update within ``seconds``."""
    steps: list[tuple[int, int]] = []
    energy, made, began = read(), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or len(steps) < 2:
        if elapsed > 10 * seconds:
            raise ValueError("the GPU's energy counter does not change; measure without --energy")
        for _ in range(chunk):
            call()
        synchronize()
        made += chunk
        if (now := read()) != energy:
            steps.append((now, made))
            energy = now
    return steps[-1][0] - steps[0][0], steps[-1][1] - steps[0][1]
