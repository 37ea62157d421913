"""What a GPU does over time: its kernels by name, and the gaps between them by their neighbours.

A gap of a microsecond or two lies between any two kernels that the host has queued in time. Longer
ones are waits for the host; the kernels around a gap tell what the host was doing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

# Of a gap, in microseconds: up to here it is the GPU's own, not a wait for the host.
LAUNCH_GAP_US = 5.0
_NAME_CHARACTERS = 60
_TORCH_OPERATION = re.compile(r"(?!ReduceOp)\b\w*([Ff]unctor|_kernel_cuda|Ops?\b)\w*")


class Interval(NamedTuple):
    """A kernel or copy on the GPU, in microseconds of any clock."""

    name: str
    start: float
    end: float


class KernelTime(NamedTuple):
    """The kernels of one name in a step."""

    name: str
    ms: float
    launches: float


class Gap(NamedTuple):
    """The gaps between two names in a step."""

    before: str  # the kernel that ends where the gap begins
    after: str
    ms: float
    times: float


class Timeline(NamedTuple):
    """The steps that were profiled, each list longest first."""

    kernels: list[KernelTime]
    waits: list[Gap]  # gaps of more than `LAUNCH_GAP_US`
    launch_gaps_ms: float  # of all other gaps, per step


def timeline(intervals: Iterable[Interval], steps: int) -> Timeline:
    """Kernels and gaps of so many steps, as means per step."""
    found = list(intervals)
    return Timeline(by_name(found, steps), *_gaps(found, steps))


def busy_us(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals, which may overlap, in microseconds."""
    lengths = (
        own.end - (own.start if last is None else max(own.start, last.end))
        for last, own in _in_order(intervals)
    )
    return sum((max(length, 0.0) for length in lengths), 0.0)


def by_name(intervals: Iterable[Interval], steps: int) -> list[KernelTime]:
    """Time and launches of each name per step, longest first.

    Overlapping kernels count in full. Names are without template arguments.
    """
    found = _totals((_short(name), end - start) for name, start, end in intervals)
    return [KernelTime(name, us / 1e3 / steps, times / steps) for name, us, times in found]


def _gaps(intervals: Iterable[Interval], steps: int) -> tuple[list[Gap], float]:
    """The waits by their neighbours, and the time in all shorter gaps, both per step."""
    waits, launch_gaps = [], 0.0
    for last, own in _in_order(intervals):
        gap = 0.0 if last is None else own.start - last.end
        if last is not None and gap > LAUNCH_GAP_US:
            waits.append(((_short(last.name), _short(own.name)), gap))
        else:
            launch_gaps += max(gap, 0.0)
    found = [Gap(*names, us / 1e3 / steps, times / steps) for names, us, times in _totals(waits)]
    return found, launch_gaps / 1e3 / steps


def _in_order(intervals: Iterable[Interval]) -> Iterator[tuple[Interval | None, Interval]]:
    """Each by its start, with the one of those before it that ends last."""
    last = None
    for interval in sorted(intervals, key=lambda interval: interval.start):
        yield last, interval
        if last is None or interval.end > last.end:
            last = interval


def _totals(found: Iterable[tuple[Key, float]]) -> list[tuple[Key, float, int]]:
    """Sum and number of the times of each key, largest sum first."""
    times: dict[Key, list[float]] = defaultdict(list)
    for key, us in found:
        times[key].append(us)
    totals = [(key, sum(own), len(own)) for key, own in times.items()]
    return sorted(totals, key=lambda total: total[1], reverse=True)


def _short(name: str) -> str:
    """Without template arguments; of a kernel of torch with what it does to each element."""
    kernel = re.split(r"[<(]", name.removeprefix("void "))[0]
    operation = _TORCH_OPERATION.search(name, len(kernel)) if kernel.startswith("at::") else None
    return f"{kernel} {operation[0]}" if operation else kernel[:_NAME_CHARACTERS]
