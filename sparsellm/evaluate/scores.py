"""Scores of an evaluation: from lm-eval's results to the mean and the printed table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sparsellm.evaluate.suite import Suite
from sparsellm.runs.records import EvaluationRecord


@dataclass(frozen=True)
class TaskScore:
    """One task, over all ranks; values are lm-eval's, digit for digit."""

    version: str | None  # of lm-eval's task; None where it states none
    shots: int
    num_rows: int  # scored
    num_rows_total: int  # in the split
    acc: float
    acc_stderr: float | None  # None for a single row
    acc_norm: float | None  # None where the task has none
    acc_norm_stderr: float | None

    def value(self, metric: str) -> float:
        """``acc`` or ``acc_norm``."""
        value = getattr(self, metric)
        assert value is not None, f"build_tasks checks that the task has {metric}"
        return value

    def stderr(self, metric: str) -> float | None:
        """Its standard error."""
        return getattr(self, f"{metric}_stderr")


@dataclass(frozen=True)
class Scores:
    """An evaluation."""

    tasks: dict[str, TaskScore]
    mean: float | None  # of the suite's seven; None where not all of them were run
    mean_stderr: float | None  # tasks taken as independent
    num_requests: int
    num_cut: int  # requests longer than the context length: their beginning was cut off


def from_lm_eval(results: dict[str, Any], suite: Suite, num_requests: int, num_cut: int) -> Scores:
    """`Scores` of what ``lm_eval.evaluate`` returned on the main rank."""
    tasks = {name: _task_score(results, name) for name in results["results"]}
    mean, mean_stderr = _mean(tasks, suite)
    return Scores(tasks, mean, mean_stderr, num_requests, num_cut)


def _task_score(results: dict[str, Any], name: str) -> TaskScore:
    found = results["results"][name]

    def number(key: str) -> float | None:
        value = found.get(f"{key},none")  # "none" is the filter's name
        return float(value) if isinstance(value, int | float) else None  # "N/A" for one row

    acc = number("acc")
    assert acc is not None, f"{name}: every task of the suite has acc"
    return TaskScore(
        # "Yaml" is what lm-eval says of a task without a version.
        version=None if (version := str(results["versions"][name])) == "Yaml" else version,
        shots=int(results["n-shot"][name]),
        num_rows=int(results["n-samples"][name]["effective"]),
        num_rows_total=int(results["n-samples"][name]["original"]),
        acc=acc,
        acc_stderr=number("acc_stderr"),
        acc_norm=number("acc_norm"),
        acc_norm_stderr=number("acc_norm_stderr"),
    )


def _mean(tasks: dict[str, TaskScore], suite: Suite) -> tuple[float | None, float | None]:
    names = [name for name, config in suite.tasks.items() if config.in_mean]
    if any(name not in tasks for name in names):
        return None, None
    values = [tasks[name].value(suite.tasks[name].metric) for name in names]
    errors = [tasks[name].stderr(suite.tasks[name].metric) for name in names]
    squares = [error**2 for error in errors if error is not None]
    mean = sum(values) / len(values)
    if len(squares) < len(errors):
        return mean, None
    return mean, math.sqrt(sum(squares)) / len(values)


def table(scores: Scores, suite: Suite) -> str:
    """A table of percentages under 100 columns; ``*`` marks those that enter the mean."""
    width = max(len(name) for name in scores.tasks) + 2
    lines = [
        f"{'task':{width}}{'version':>8}{'shots':>7}{'rows':>9}  {'acc':>15}  {'acc_norm':>15}"
    ]
    for name, score in scores.tasks.items():
        config = suite.tasks[name]
        starred = config.metric if config.in_mean else ""
        cells = [
            _cell(getattr(score, metric), score.stderr(metric), metric == starred)
            for metric in ("acc", "acc_norm")
        ]
        lines.append(
            f"{name:{width}}{score.version or '-':>8}{score.shots:>7}{score.num_rows:>9,}"
            f"  {cells[0]:>15}  {cells[1]:>15}"
        )
    lines.append(_mean_line(scores, suite))
    if scores.num_cut:
        lines.append(
            f"{scores.num_cut:,} of {scores.num_requests:,} requests are longer than the context "
            "and lost their beginning"
        )
    if any(score.num_rows < score.num_rows_total for score in scores.tasks.values()):
        lines.append("limited to the first rows of each task: no result to report")
    return "\n".join(lines)


def _cell(value: float | None, stderr: float | None, starred: bool) -> str:
    if value is None:
        return "- "
    error = "" if stderr is None else f" ± {stderr:.2%}".replace("%", "")
    return f"{100 * value:.2f}{error}{'*' if starred else ' '}"


def _mean_line(scores: Scores, suite: Suite) -> str:
    names = [name for name, config in suite.tasks.items() if config.in_mean]
    if scores.mean is None:
        missing = [name for name in names if name not in scores.tasks]
        return f"mean: needs all {len(names)} tasks (not run: {', '.join(missing)})"
    return (
        f"mean of the {len(names)} scores with *: {_cell(scores.mean, scores.mean_stderr, False)}"
    )


def to_record(scores: Scores, step: int, tokens: int) -> EvaluationRecord:
    """The values of `Scores` that are logged."""
    tasks = {name: asdict(score) for name, score in scores.tasks.items()}
    return EvaluationRecord(step, tokens, scores.mean, scores.mean_stderr, tasks)
