"""Turns the records of a training run into the figures and ratios of `bench train`."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Reading, spread
from sparsellm.ffn.training_path.capacity import SHRUNK_STEPS
from sparsellm.runs.telemetry.metrics import Line

MIN_STEADY = 3
MAX_DRIFT = 0.2  # relative change of non-zeros per token between the halves of the measured part


class Figures(NamedTuple):
    """Figures of one run."""

    values: dict[str, float]  # of the metrics in `UNITS`; what could not be measured is absent
    # Of the throughput, as a record has it; watts are those of all GPUs.
    sustained: dict[str, float]


# The unit of each metric. For some, a dense run on the same GPUs is the baseline (`COMPARED`).
UNITS = {
    "tokens_per_ms": "tokens/ms",
    "mfu": "of the bf16 peak, FLOPs executed",
    "mfu_dense": "of the bf16 peak, FLOPs of the dense model",
    "memory_GiB": "GiB, peak of rank 0",
    "mJ_per_token": "mJ",
    "sparse_layers": "layers",
    "union_mean": "neurons of 64 tokens, mean over layers",
    "nnz": "neurons per token, mean over layers",
    "loss": "nats per token",
    "tokens_per_ms_a_gpu": "tokens/ms",
}
COMPARED = ("tokens_per_ms", "memory_GiB", "mJ_per_token")


def figures(
    records: Sequence[Line],
    readings: Sequence[Reading],
    tokens_a_step: int,
    *,
    checks_steady_state: bool = True,
    on_gpu: bool = True,
) -> Figures:
    """The figures of a run's second half, when everything is compiled and warm.

    Throughputs are medians over the steps whose layers took the same paths as in the step before.
    Memory is the last step's.

    Args:
        records: the records of every step.
        readings: of all GPUs at the end of steps; some may be missing.
        tokens_a_step: tokens per step of all ranks.
        checks_steady_state: whether to refuse a run whose sparsity still changes.
        on_gpu: whether the run used GPUs; if not, memory (of the process) is not reported.

    Raises:
        ValueError: there are too few steps in a steady state, or the non-zeros drift.
    """
    half = len(records) // 2
    part = records[half:]
    steady = _steady(records, half)
    nnz = [statistics.mean(record["sparsity"]["nnz_mean"]) for record in part]
    first, last = (statistics.mean(h) for h in (nnz[: len(nnz) // 2], nnz[len(nnz) // 2 :]))
    if checks_steady_state and abs(last - first) > MAX_DRIFT * max(first, 1e-9):
        raise ValueError(
            f"sparsity is not in its steady state: {first:.1f} → {last:.1f} non-zeros per token "
            "within the measured steps; train longer before, and give --init-from"
        )
    end = records[-1]
    sparse_layers = sum(end["kernels"]["sparse"])
    throughput, sustained = spread([record["tokens_per_second"] / 1e3 for record in steady])
    values = {
        "tokens_per_ms": throughput,
        "sparse_layers": sparse_layers,
        "union_mean": statistics.mean(end["kernels"]["union_mean"]),
        "nnz": last,
        "loss": end["loss"],
    }
    for metric in ("mfu", "mfu_dense"):
        if None not in (mfu := [record[metric] for record in steady]):  # the GPU's peak is known
            values[metric] = statistics.median(mfu)
    # A sparse layer reserves memory for the worst case until it has seen so many steps.
    if on_gpu and (not sparse_layers or len(records) > SHRUNK_STEPS):
        values["memory_GiB"] = end["memory_gib"]
    counted = [reading for reading in readings if reading.at >= part[0]["step"] - 1]
    if len(counted) > 1:
        tokens = (counted[-1].at - counted[0].at) * tokens_a_step
        values["mJ_per_token"] = (counted[-1].millijoules - counted[0].millijoules) / tokens
        sustained["watts"] = values["mJ_per_token"] * throughput
        sustained["sm_mhz"] = statistics.median(reading.sm_mhz for reading in counted)
    return Figures(values, sustained)


def _steady(records: Sequence[Line], half: int) -> list[Line]:
    """The records from ``half`` on whose layers took the same paths as in the step before."""
    steady = [
        after
        for before, after in itertools.pairwise(records[max(half - 1, 0) :])
        if before["kernels"]["sparse"] == after["kernels"]["sparse"]
    ]
    if len(steady) < MIN_STEADY:
        raise ValueError(
            f"only {len(steady)} of the last {len(records) - half} steps took the same paths as "
            "the step before: sparsity is not in its steady state; increase --steps, or train "
            "longer before and give --init-from"
        )
    return steady


def measurements(
    case: dict[str, Any], run_figures: Figures, dense: Figures | None, alone: Figures | None
) -> list[Measurement]:
    """The measurements of a run; ratios above 1 are better.

    Args:
        case: the run's keys, including ``gpus``.
        run_figures: the run's figures.
        dense: figures of the dense run on the same GPUs and configuration: the baseline of
            throughput, memory and energy.
        alone: figures of one GPU with the same kernels: the baseline of the throughput per GPU,
            whose ratio is the scaling efficiency.
    """
    rows = []
    against = dict.fromkeys(COMPARED, dense) | {"tokens_per_ms_a_gpu": alone}
    values = run_figures.values | {
        "tokens_per_ms_a_gpu": run_figures.values["tokens_per_ms"] / case["gpus"]
    }
    for metric, unit in UNITS.items():
        if (value := values.get(metric)) is None:
            continue
        other = against.get(metric)
        base = other.values.get(metric.removesuffix("_a_gpu")) if other else None
        ratio = base and (value / base if unit == "tokens/ms" else base / value)
        rows.append(Measurement("train", case, metric, value, unit, base, ratio))
    under = dense.sustained if dense else None
    return [replace(rows[0], sustained=run_figures.sustained, baseline_sustained=under), *rows[1:]]
