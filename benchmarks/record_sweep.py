"""Records how a sweep's runs ended: final values, validation losses, scores and target of each.

Everything is read from the runs' records, so this works on another machine than the one that
trained. Hardware, commit and command are also those that the runs recorded.

    python benchmarks/record_sweep.py runs/quality --record benchmarks/results.jsonl

``--curves`` names the runs that a figure draws; of the others the last validation is enough.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from sparsellm.bench.record import Measurement, append, row
from sparsellm.report.collect import RunData
from sparsellm.report.sweep_runs import last_nnz, read_sweep
from sparsellm.runs.files import SWEEP_FILE

SETTLED = 0.1  # relative to the target
WINDOW_STEPS = 20  # averaged, since one step's non-zeros are noisy


def main(words: list[str] | None = None) -> None:
    """Prints the figures of every run that has begun, and records them with ``--record``."""
    parser = argparse.ArgumentParser(description="Records how a sweep's runs ended.")
    parser.add_argument("folder", type=Path, metavar="SWEEP", help="folder such as runs/quality")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    parser.add_argument(
        "--curves",
        nargs="*",
        default=["*"],
        metavar="RUN",
        help="record all validations of these runs, of others only the last; a name may hold "
        "wildcards (default: of all runs)",
    )
    options = parser.parse_args(words)
    for measurements in figures(options.folder, options.curves):
        print(row(measurements))
        if options.record:
            append(measurements, options.record)


def figures(folder: Path, curves: Sequence[str] = ("*",)) -> Iterator[list[Measurement]]:
    """The figures of each run that has begun.

    Args:
        folder: of the sweep.
        curves: names of the runs, or patterns of them, with all their validations.

    Raises:
        FileNotFoundError: the folder is not a sweep, or none of its runs has begun.
        ValueError: a file is damaged.
    """
    sweep = read_sweep(folder)
    command = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8")).get("command")
    by = {"command": command} if command else {}
    for run in sweep.runs:
        context = taken_by(run.sessions) | by
        all_validations = any(fnmatchcase(run.path.name, pattern) for pattern in curves)
        measurements = _figures(f"sweep_{sweep.name}", run, all_validations)
        yield [replace(m, context=context) for m in measurements]


def taken_by(sessions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where and when a run was trained, for its records: from the last session that it recorded."""
    if not sessions:
        return {}
    session = sessions[-1]
    device = "CPU" if session["device"] == "cpu" else session["device"]
    where = device if device == "CPU" and session["ranks"] == 1 else f"{session['ranks']}× {device}"
    context = {"hardware": f"{where}, {session['cores']} cores", "date": session["started"][:10]}
    return context | ({"commit": session["commit"]} if session["commit"] else {})


def _figures(bench: str, run: RunData, all_validations: bool) -> list[Measurement]:
    recipe, end = run.recipe, run.train[-1]
    base = {
        "run": run.path.name,
        "layers": recipe.model.num_hidden_layers,
        "hidden_size": recipe.model.hidden_size,
        "intermediate_size": recipe.model.intermediate_size,
        "l1_coefficient": recipe.sparsity.l1_coefficient,
        "kernels": recipe.ffn.kernels,
        "seed": recipe.seed,
        "learning_rate": recipe.optimizer.learning_rate,
        "precision": recipe.runtime.precision,
        "step": run.end["step"],
        "tokens": run.end["tokens"],
        "activation": recipe.ffn.activation,
        "gated": recipe.ffn.gated,
        "target_nnz": recipe.sparsity.target_nnz,
    }
    if recipe.optimizer.name != "adamw":
        base["optimizer"] = recipe.optimizer.name
        if recipe.gates_by_adamw:
            base["gate_learning_rate"] = recipe.optimizer.gate_peak
        if recipe.optimizer.normalize_neurons:
            base["normalize_neurons"] = True
    measurements: list[Measurement] = []

    def of(metric: str, value: float, unit: str, **case: Any) -> None:
        measurements.append(Measurement(bench, base | case, metric, value, unit))

    nnz = last_nnz(run)
    half = run.train[len(run.train) // 2 :]
    of("loss", end["loss"], "nats per token")
    of("nnz", nnz, "neurons per token, mean over layers and the last tenth of the steps")
    dead = statistics.fmean(end["sparsity"]["dead_fraction"])
    of("dead_fraction", dead, "of N, mean over layers")
    of("throughput", statistics.median(r["tokens_per_second"] for r in half), "tokens/s")
    of("l1_at_end", end["l1_coefficient"], "λ")
    steps, spent = gpu_seconds(run)
    for record in run.validation if all_validations else run.validation[-1:]:
        step = {"step": record["step"], "tokens": record["tokens"]}
        of("validation_loss", record["loss"], "nats per token", **step)
        if spent:
            seconds = float(np.interp(record["step"], steps, spent))
            of("gpu_seconds", seconds, "s of training until then, of all GPUs", **step)
    for evaluation in run.evaluations[-1:]:
        limit = {} if evaluation.limit is None else {"limit": evaluation.limit}
        if evaluation.mean is not None:
            of("score_mean", evaluation.mean.value, "of questions, mean of the tasks", **limit)
        for (task, metric), score in evaluation.scores.items():
            of(metric, score.value, "of questions", task=task, **limit)
    if recipe.sparsity.target_nnz:
        target = recipe.sparsity.target_nnz
        of("target_error", nnz / target - 1, "of the target, last tenth of the steps")
        step_settled = settled_step(run.train, target)
        if step_settled is not None:
            unit = f"step from which the mean of {WINDOW_STEPS} steps stays within {SETTLED:.0%}"
            of("settled_step", step_settled, unit)
    return measurements


def gpu_seconds(run: RunData) -> tuple[list[int], list[float]]:
    """The recorded steps, and the seconds of training until each, over all GPUs and processes.

    Compilation, validation and checkpoints are not counted. A step that a process made after its
    last record counts as one of those after it.
    """
    steps: list[int] = []
    totals: list[float] = []
    total, last = 0.0, 0.0
    process: dict[str, Any] = {}
    for record in run.train:
        step, seconds, not_recorded = record["step"], record["train_seconds"], 0
        before, process = process, [s for s in run.sessions if s["step"] < step][-1]
        if process is not before:
            last = 0.0  # a new process counts from zero
            not_recorded = process["step"] - steps[-1] if steps else 0
        each = process["ranks"] * (seconds - last)
        total += each + each / (step - process["step"]) * not_recorded
        last = seconds
        steps.append(step)
        totals.append(total)
    return steps, totals


def settled_step(train: list[dict[str, Any]], target: float) -> int | None:
    """First recorded step from which the non-zeros stay near the target; None if they end off it.

    The mean over layers and over the records of the last `WINDOW_STEPS` steps is compared.

    Args:
        train: records of training steps, in order.
        target: target of non-zeros per token.
    """
    settled = None
    nnz = [(r["step"], statistics.fmean(r["sparsity"]["nnz_mean"])) for r in train]
    for step, _ in nnz:
        mean = statistics.fmean(value for at, value in nnz if step - WINDOW_STEPS < at <= step)
        if abs(mean / target - 1) > SETTLED:
            settled = None
        elif settled is None:
            settled = step
    return settled


if __name__ == "__main__":
    main()
