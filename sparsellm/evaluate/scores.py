"""Scores of an evaluation: from lm-eval's results to the mean and the printed table."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparsellm.evaluate.suite import Suite
from sparsellm.runs.telemetry.evaluations import Score, stderr_name, task_metrics
from sparsellm.runs.telemetry.records import EvaluationRecord

_ACCURACIES = ("acc", "acc_norm")
_NO_VERSION = ("Yaml", "None", "N/A")


@dataclass(frozen=True)
class Scores:
    """An evaluation, over all ranks; values are lm-eval's, digit for digit."""

    # Of each task, as it is recorded:
    # - version: lm-eval's, None where the task states none; shots;
    # - num_rows: scored; num_rows_total: in the split;
    # - each metric and its standard error, such as acc and acc_stderr, with a filter of lm-eval's
    #   exact_match (strict-match). A task of the suite has acc and acc_norm at most. A single row
    #   has no standard error.
    tasks: dict[str, dict[str, Any]]
    mean: float | None  # of the suite's seven; None where not all of them were run
    mean_stderr: float | None  # tasks taken as independent
    num_requests: int
    num_cut: int  # requests that do not fit the context: their beginning was cut off
    # Those of them whose answer alone is longer. lm-eval itself would end with an error.
    num_answers_cut: int = 0


def from_lm_eval(
    results: dict[str, Any], suite: Suite, num_requests: int, num_cut: int, num_answers_cut: int = 0
) -> Scores:
    """`Scores` of what ``lm_eval.evaluate`` returned on the main rank."""
    tasks = {name: _task(results, name, suite) for name in results["results"]}
    mean, mean_stderr = _mean(tasks, suite)
    return Scores(tasks, mean, mean_stderr, num_requests, num_cut, num_answers_cut)


def _task(results: dict[str, Any], name: str, suite: Suite) -> dict[str, Any]:
    values = dict(_values(results["results"][name]))
    if name in suite.tasks:
        values = {k: v for k, v in values.items() if k.removesuffix("_stderr") in _ACCURACIES}
    rows = results["n-samples"].get(name) or _rows_of_group(results, name)
    # "Yaml" is what lm-eval says of a task without a version.
    version = str(results["versions"].get(name))
    return {
        "version": None if version in _NO_VERSION else version,
        "shots": int(results["n-shot"].get(name, 0)),
        "num_rows": int(rows["effective"]),
        "num_rows_total": int(rows["original"]),
        **values,
    }


def _values(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")  # such as "acc,none"
        # A standard error of one row is "N/A".
        if comma and isinstance(value, int | float) and not isinstance(value, bool):
            yield metric if filter_name == "none" else f"{metric} ({filter_name})", float(value)


def _rows_of_group(results: dict[str, Any], name: str) -> dict[str, int]:
    """All rows of a group's tasks, including those of the groups in it."""
    counts = {"effective": 0, "original": 0}
    for child in results.get("group_subtasks", {}).get(name, []):
        rows = results["n-samples"].get(child) or _rows_of_group(results, child)
        counts = {key: count + int(rows[key]) for key, count in counts.items()}
    return counts


def _mean(tasks: dict[str, dict[str, Any]], suite: Suite) -> tuple[float | None, float | None]:
    metrics = {name: config.metric for name, config in suite.tasks.items() if config.in_mean}
    if not metrics.keys() <= tasks.keys():
        return None, None
    # `build_tasks` checks that each task has its metric.
    values = [tasks[name][metric] for name, metric in metrics.items()]
    errors = [tasks[name].get(f"{metric}_stderr") for name, metric in metrics.items()]
    squares = [error**2 for error in errors if error is not None]
    mean = sum(values) / len(values)
    if len(squares) < len(errors):
        return mean, None
    return mean, math.sqrt(sum(squares)) / len(values)


def table(scores: Scores, suite: Suite) -> str:
    """A table under 100 columns, accuracies in percent; ``*`` marks those that enter the mean."""
    width = max(len(name) for name in scores.tasks) + 2
    lines = [
        f"{'task':{width}}{'version':>8}{'shots':>7}{'rows':>9}  {'acc':>15}  {'acc_norm':>15}"
    ]
    for name, task in scores.tasks.items():
        config = suite.tasks.get(name)
        starred = config.metric if config and config.in_mean else ""
        texts = {
            metric: Score(value, task.get(stderr_name(metric)), metric == starred).text(metric)
            for metric, value in task_metrics(task).items()
        }
        cells = [texts.pop(metric, "-") for metric in _ACCURACIES]
        # A star stands in a column of its own.
        acc, acc_norm = (cell if cell.endswith("*") else f"{cell} " for cell in cells)
        lines.append(
            f"{name:{width}}{task['version'] or '-':>8}{task['shots']:>7}{task['num_rows']:>9,}"
            f"  {acc:>15}  {acc_norm:>15}"
        )
        lines += [f"  {metric}: {text}" for metric, text in texts.items()]
    if scores.tasks.keys() & suite.tasks.keys():
        lines.append(_mean_line(scores, suite))
    if scores.num_cut:
        lines.append(
            f"{scores.num_cut:,} of {scores.num_requests:,} requests do not fit the context and "
            "lost their beginning"
        )
    if scores.num_answers_cut:
        lines.append(
            f"{scores.num_answers_cut:,} of these have an answer that alone is longer: only its "
            "end is scored (lm-eval refuses it)"
        )
    if any(task["num_rows"] < task["num_rows_total"] for task in scores.tasks.values()):
        lines.append("limited to the first rows of each task: not a result to report")
    return "\n".join(lines)


def _mean_line(scores: Scores, suite: Suite) -> str:
    names = [name for name, config in suite.tasks.items() if config.in_mean]
    if scores.mean is None:
        missing = [name for name in names if name not in scores.tasks]
        return (
            f"mean of the scores with *: needs all {len(names)} tasks "
            f"(not run: {', '.join(missing)})"
        )
    mean = Score(scores.mean, scores.mean_stderr).text("acc")
    return f"mean of the {len(names)} scores with *: {mean}"


def to_record(scores: Scores, step: int, tokens: int) -> EvaluationRecord:
    """The values of `Scores` that are logged."""
    return EvaluationRecord(step, tokens, scores.mean, scores.mean_stderr, scores.tasks)
