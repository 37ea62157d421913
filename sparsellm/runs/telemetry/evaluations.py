"""Benchmark scores of a run: from its metrics, and from the files of `sparsellm eval`."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, FiniteFloat

from sparsellm.recipe.strict import read_model
from sparsellm.runs.telemetry.records import of_kind

_COUNTS = ("shots", "num_rows", "num_rows_total")  # numbers of a task that are not metrics
# From 0 to 1 in all tasks; f1 is in percent in some of them (squadv2, scrolls).
_PERCENT = ("acc", "exact_match")


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    value: float
    stderr: float | None
    in_mean: bool = False

    def text(self, metric: str) -> str:
        """The value as text: accuracies in percent, with ``*`` if it enters the mean."""
        scale, digits = (100, 2) if metric.startswith(_PERCENT) else (1, 4)
        error = "" if self.stderr is None else f" ± {scale * self.stderr:.{digits}f}"
        return f"{scale * self.value:.{digits}f}{error}{'*' if self.in_mean else ''}"


@dataclass(frozen=True)
class Evaluation:
    """All scores of one step."""

    step: int | None  # None where the file does not say
    tokens: int | None
    mean: Score | None
    scores: dict[tuple[str, str], Score]  # by (task, metric)
    limit: int | None = None  # rows that were scored, if some task has more

    @property
    def worth(self) -> tuple[bool, bool, int, int]:
        """A key for comparison: the larger, the more complete is the evaluation."""
        whole = self.limit is None
        return whole, whole and self.mean is not None, len(self.scores), self.limit or 0

    @property
    def caveat(self) -> str:
        """A remark that must accompany the scores; empty for whole tasks."""
        if self.limit is None:
            return ""
        return f"only the first {self.limit:,} rows of each task, not a result to report"


class _TaskScores(BaseModel):
    model_config = ConfigDict(extra="allow")

    acc: FiniteFloat | None = None
    acc_norm: FiniteFloat | None = None


class _ScoresFile(BaseModel):
    """What `sparsellm eval` writes."""

    model_config = ConfigDict(extra="allow")

    step: int | None = None
    tokens: int | None = None
    mean: FiniteFloat | None = None
    mean_stderr: float | None = None
    tasks: dict[str, _TaskScores] | None = None
    suite: dict[str, Any] = {}


def read_evaluations(run_path: Path, records: list[dict[str, Any]]) -> list[Evaluation]:
    """One evaluation per step, sorted; of several at the same step, the most complete one.

    In order of importance, it is the one of whole tasks (without a limit), of the whole suite, with
    the most scores, with the most rows, and with the shortest file name, which is that of the usual
    kernels and dtype.

    Reads the run's records of kind ``evaluation`` and every ``eval*.json`` in the run's folder, in
    ``checkpoints/`` and in a checkpoint.

    Raises:
        ValueError: a file is damaged.
    """
    tokens = {record["step"]: record["tokens"] for record in records}
    evaluations = [_evaluation(record) for record in of_kind(records, "evaluation")]
    # Those made while training are records; those of `sparsellm eval` are files.
    for pattern in ("eval*.json", "checkpoints/eval*.json", "checkpoints/step_*/eval*.json"):
        for path in sorted(run_path.glob(pattern), key=lambda path: (-len(path.name), path)):
            content = read_model(path, _ScoresFile, "restore it, or evaluate again")
            named = re.search(r"step_(\d+)", f"{path.parent.name}/{path.name}")
            if content.get("step") is None and named:
                content["step"] = int(named[1])
            evaluations.append(
                _evaluation({"tokens": tokens.get(content.get("step", -1))} | content)
            )
    best: dict[int | None, Evaluation] = {}
    for evaluation in evaluations:
        previous = best.get(evaluation.step)
        if evaluation.scores and (previous is None or evaluation.worth >= previous.worth):
            best[evaluation.step] = evaluation
    return sorted(best.values(), key=lambda e: -1 if e.step is None else e.step)


def _evaluation(content: dict[str, Any]) -> Evaluation:
    """The evaluation in a record, or in a file of scores."""
    tasks: dict[str, Any] = content.get("tasks") or {}
    suite, scores = content.get("suite", {}).get("tasks", {}), {}
    for task, values in tasks.items():
        config = suite.get(task, {})
        for metric, value in task_metrics(values).items():
            in_mean = bool(config.get("in_mean")) and config.get("metric") == metric
            error = values.get(stderr_name(metric))
            scores[task, metric] = Score(value, error if _is_number(error) else None, in_mean)
    # Records do not name the limit. It is known by the tasks that have more rows than were scored.
    rows = [(values.get("num_rows"), values.get("num_rows_total")) for values in tasks.values()]
    cut = [n for n, total in rows if _is_number(n) and _is_number(total) and n < total]
    mean = content.get("mean")
    return Evaluation(
        content.get("step"),
        content.get("tokens"),
        Score(float(mean), content.get("mean_stderr")) if _is_number(mean) else None,
        scores,
        int(max(cut)) if cut else None,
    )


def task_metrics(values: dict[str, Any]) -> dict[str, float]:
    """The metrics among what is recorded of a task, without their standard errors."""
    return {
        key: value
        for key, value in values.items()
        if _is_number(value) and key not in _COUNTS and "_stderr" not in key
    }


def stderr_name(metric: str) -> str:
    """The name of a metric's standard error; the name of a filter comes last."""
    name, space, filter_name = metric.partition(" ")
    return f"{name}_stderr{space}{filter_name}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
