"""GPU times of several sides that alternate in one run, and the two ceilings to compare them with.

A GPU slows down by 5 to 15% within seconds of load: sides measured one after the other would run
under different conditions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]
Prepare = Callable[[Sequence[Call]], Call]  # `in_a_row` or `graph`
MAX_ROUNDS, MIN_ROUNDS = 50, 5


class Ceilings(NamedTuple):
    """The best rates that were measured on this GPU."""

    tflops: float  # a large bf16 GEMM, TFLOP/s
    gbytes_per_s: float  # a large copy, read and written, GB/s


def interleaved(
    sides: Mapping[str, Sequence[Call]], seconds: float, lead: Call | None = None
) -> dict[str, float]:
    """Median ms of one call of each side.

    Args:
        sides: the calls of each side by name, such as one call per copy of the weights; each round
            takes the next one, and no two sides take the same number in a round.
        seconds: approximate duration; at least 5 and at most 50 rounds are made.
        lead: called before each call and not timed, see `other_work`.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    rounds = [_round(sides, 0, lead)]
    torch.cuda.synchronize()
    fitting = int(seconds / (time.perf_counter() - began))
    last = min(max(fitting, MIN_ROUNDS), MAX_ROUNDS)
    rounds += [_round(sides, number, lead) for number in range(1, last)]
    torch.cuda.synchronize()
    return {
        name: statistics.median(times[name][0].elapsed_time(times[name][1]) for times in rounds)
        for name in sides
    }


def _round(
    sides: Mapping[str, Sequence[Call]], number: int, lead: Call | None = None
) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
    events = {}
    for place, (name, calls) in enumerate(sides.items()):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call = calls[(number * len(sides) + place) % len(calls)]
        if lead is not None:
            lead()
        start.record()
        call()
        end.record()
        events[name] = (start, end)
    return events


def other_work(device: torch.device) -> Call:
    """Waits for the GPU, then queues work of at least a millisecond for even a large one.

    Meanwhile the host launches what follows, as in a model, where it runs ahead of the GPU.
    """
    size = 8192
    a, b, c = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3))

    def work() -> None:
        torch.cuda.synchronize(device)
        torch.mm(a, b, out=c)

    return work


def in_a_row(calls: Sequence[Call]) -> Call:
    """Runs all calls one after the other; the host may run ahead of the GPU, as in a model."""

    def run() -> None:
        for call in calls:
            call()

    return run


def graph(calls: Sequence[Call]) -> Call:
    """Captures all calls, which must be warm, in one CUDA graph; returns the graph's replay."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    return captured.replay


def ms_of_a_call(
    sides: Mapping[str, Sequence[Call]], prepare: Prepare, least: int, seconds: float
) -> dict[str, float]:
    """`interleaved` for at least ``least`` calls of each side in a row, joined by ``prepare``."""
    rows = {name: [*calls] * -(-least // len(calls)) for name, calls in sides.items()}
    ms = interleaved({name: [prepare(row)] for name, row in rows.items()}, seconds)
    return {name: value / len(rows[name]) for name, value in ms.items()}


def ceilings(device: torch.device) -> Ceilings:
    """Measures a bf16 matmul of 8192³ and a copy of 1 GiB, after half a second of load."""
    size, num_bytes = 8192, 2**30
    a, b, c = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3))
    source = torch.ones(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    sides: dict[str, list[Call]] = {
        "matmul": [lambda: torch.mm(a, b, out=c)],
        "copy": [lambda: target.copy_(source)],
    }
    began = time.perf_counter()
    while time.perf_counter() - began < 0.5:
        _round(sides, 0)
        torch.cuda.synchronize()
    ms = interleaved(sides, 0.5)
    return Ceilings(2 * size**3 / ms["matmul"] / 1e9, 2 * num_bytes / ms["copy"] / 1e6)


def copies_beyond_cache(num_bytes: int, device: torch.device) -> int:
    """Number of copies, at least two, whose total size is over three times any L2 cache."""
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-3 * cache // num_bytes))
