"""Selects records of sweeps: a group for the runs that differ only in their seed."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from results import Line, gpu_of


@dataclass(frozen=True)
class SweepGroup:
    """Runs of a sweep that differ only in their seed; lists have one value per seed."""

    sweep: str
    name: str
    gpu: str  # the kind
    case: dict[str, Any]  # of one of them
    nnz: list[float]  # at the last step, non-zeros per token
    losses: list[float]  # held out, nats per token
    rates: list[float]  # tokens/s, median over the second half of the recorded steps
    dead: list[float]
    scores: list[float]  # mean over the tasks; not of limited rows
    gpu_seconds: list[float]  # of training, of all GPUs; none in older records
    lines: list[Line]

    @property
    def size(self) -> tuple[int, int, int]:
        """Layers, model width and training tokens: only equal ones are compared."""
        return self.case["layers"], self.case["hidden_size"], self.case["tokens"]

    @property
    def is_of_frontier(self) -> bool:
        """Whether its sweep is one over widths; those have a table and a figure of their own."""
        return self.sweep.startswith("frontier")

    @property
    def is_dense_relu(self) -> bool:
        """Whether it is gated and without L1: the baseline of sparse groups."""
        case = self.case
        plain = not case["l1_coefficient"] and not case.get("target_nnz")
        return plain and case.get("activation", "relu") == "relu" and case.get("gated", True)


def sweep_groups(lines: Sequence[Line]) -> list[SweepGroup]:
    """The groups of every benchmark ``sweep_…``, which record_sweep.py writes."""
    by_run: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        gpu = gpu_of(line)
        if line["bench"].startswith("sweep_") and gpu is not None:
            run = line["case"].get("run", line["case"].get("recipe"))
            by_run[line["bench"].removeprefix("sweep_"), run, gpu].append(line)
    groups: dict[tuple[str, str, str], list[list[Line]]] = defaultdict(list)
    for (sweep, run, gpu), found in by_run.items():
        own = [line for line in found if line["commit"] == found[-1]["commit"]]
        groups[sweep, re.sub(r"-seed\d+$", "", run), gpu].append(own)
    return [_group(*named, members) for named, members in groups.items()]


def _group(sweep: str, name: str, gpu: str, members: list[list[Line]]) -> SweepGroup:
    def each(metric: str, take: Callable[[list[float]], float]) -> list[float]:
        found = []
        for own in members:
            whole = [r for r in own if r["metric"] == metric and "limit" not in r["case"]]
            by_step = {r["case"]["step"]: r["value"] for r in whole}
            if by_step:
                found.append(take([by_step[step] for step in sorted(by_step)]))
        return found

    lines = [line for own in members for line in own]
    return SweepGroup(
        sweep,
        name,
        gpu,
        max((line["case"] for line in lines), key=lambda case: case["step"]),
        nnz=each("nnz", lambda values: values[-1])
        or each("non-zeros per token", lambda values: values[-1]),
        losses=each("validation_loss", lambda values: values[-1]),
        rates=each("throughput", lambda values: statistics.median(values[len(values) // 2 :]))
        or each("tokens_per_second", lambda values: values[-1]),
        dead=each("dead_fraction", lambda values: values[-1]),
        scores=each("score_mean", lambda values: values[-1]),
        gpu_seconds=each("gpu_seconds", lambda values: values[-1]),
        lines=lines,
    )


def dense_relu_losses(groups: Iterable[SweepGroup]) -> dict[tuple[int, int, int], float]:
    """Mean held-out loss of dense ReLU for each `SweepGroup.size`."""
    losses: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for group in groups:
        if group.is_dense_relu:
            losses[group.size] += group.losses
    return {size: statistics.fmean(values) for size, values in losses.items() if values}


def forwards(lines: Iterable[Line], group: SweepGroup, metric: str) -> list[Line]:
    """The newest records of `bench forward` for the group's runs.

    Args:
        lines: all records.
        group: of a sweep.
        metric: ``tokens_per_ms`` or ``mJ_per_token`` of the model, ``ms`` of each layer's FFN.
    """
    bench = "layer_forward" if metric == "ms" else "model_forward"
    by_run: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        case = line["case"]
        if (line["bench"], line["metric"]) != (bench, metric) or "run" not in case:
            continue
        # Runs of other sweeps may have the same name.
        same_size = (case["layers"], case.get("K")) == group.size[:2]
        if same_size and f"/{group.sweep}/{case['run']} " in line["command"]:
            by_run[case["run"]].append(line)
    runs = dict.fromkeys(line["case"]["run"] for line in group.lines)
    return [line for run in runs for line in by_run[run] if _taken_with(line, by_run[run][-1])]


def _taken_with(line: Line, newest: Line) -> bool:
    orders = [one["case"].get("token_order") for one in (line, newest)]
    return line["commit"] == newest["commit"] and orders[0] == orders[1]
