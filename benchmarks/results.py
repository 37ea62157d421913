"""Reads results.jsonl and selects from it: of records of the same case the newest counts.

Tables, figures and claims select with these functions, so a number has one source.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from sparsellm.runs.files import read_json_lines

Line = dict[str, Any]  # a line of results.jsonl

FOLDER = Path(__file__).resolve().parent
RECORDS = FOLDER / "results.jsonl"
SHAPE: dict[str, Any] = {"M": 16_384, "K": 2048, "N": 5632}  # of the FFN in figures and tables
# Keys of a case that describe its outcome and do not identify it.
OUTCOMES = ("measured_nnz", "union_64", "path", "l1_coefficient")
# Keys that a case has only where they differ from the usual. `find` takes them to be absent.
UNUSUAL = (
    "arch", "format", "precision", "token_order", "traces", "weight_gradients", "vocab_size",
    "limit",
)  # fmt: skip


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow")

    bench: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    sustained: dict[str, float] | None = None
    baseline_sustained: dict[str, float] | None = None
    hardware: str
    commit: str
    command: str


def read_records(path: Path) -> list[Line]:
    """All recorded lines.

    Raises:
        ValueError: a line is damaged; names file, line and key.
    """
    return read_json_lines(path, _Record, "restore the file, or correct that line")


def find(lines: Sequence[Line], bench: str, metric: str, *, gpu: str = "H200", **case: Any) -> Line:
    """The newest record of a case.

    Args:
        lines: all records, oldest first.
        bench: benchmark.
        metric: such as ``ms``.
        gpu: part of the hardware's name.
        case: keys of the case and their values; a text may have wildcards, and None says that the
            key is absent or null. Keys of `UNUSUAL` that are not named are absent.

    Raises:
        ValueError: there is no such record, or the newest are of several cases.
    """
    case = dict.fromkeys(UNUSUAL) | case
    matching = [
        line
        for line in lines
        if (line["bench"], line["metric"]) == (bench, metric)
        and gpu in line["hardware"]
        and matches(line["case"], case)
    ]
    query = f"{bench} {metric} on {gpu} with {case}"
    if not matching:
        raise ValueError(f"{query}: there is no such record")
    newest = [line for line in matching if line["commit"] == matching[-1]["commit"]]
    if len(cases := {_case_text(line["case"]) for line in newest}) > 1:
        raise ValueError(f"{query}: several cases, name more keys:\n" + "\n".join(sorted(cases)))
    return newest[-1]


def matches(case: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Whether a case has these keys; as `find` compares them."""
    return all(
        fnmatchcase(f"{case.get(key)}", value) if isinstance(value, str) else case.get(key) == value
        for key, value in conditions.items()
    )


def _case_text(case: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in case.items() if k not in OUTCOMES}, sort_keys=True)


def measured(lines: Sequence[Line], bench: str, metric: str, case: dict[str, Any]) -> Line | None:
    """The record of one FFN with the kernels that ``auto`` chose; None: there is none."""
    if bench == "ffn_train":
        case = case | {"launch": "graph" if "precision" in case else None}
    else:
        case = case | {"kernels": "auto"}
    try:
        return find(lines, bench, metric, **case)
    except ValueError:
        return None


class Run(NamedTuple):
    """What record_sweep.py recorded of one run of a sweep."""

    case: dict[str, Any]  # at its last step
    by_metric: dict[str, dict[int, float]]  # values by step, in ascending order

    def last(self, metric: str) -> float:
        """The value of a metric at the last step.

        Raises:
            KeyError: it was not recorded.
        """
        return list(self.by_metric[metric].values())[-1]


def runs(
    lines: Sequence[Line], sweep: str, name: str, *, gpu: str = "H200", commit: str | None = None
) -> list[Run]:
    """The runs of a sweep with such a name (which may have wildcards).

    Args:
        lines: all records, oldest first.
        sweep: its name.
        name: of the runs.
        gpu: part of the hardware's name.
        commit: at which they were trained; None: each at its newest.

    Raises:
        ValueError: there is none.
    """
    by_name: dict[str, list[Line]] = {}
    for line in lines:
        case = line["case"]
        if line["bench"] != f"sweep_{sweep}" or gpu not in line["hardware"] or "limit" in case:
            continue
        if fnmatchcase(case["run"], name) and commit in (None, line["commit"]):
            by_name.setdefault(case["run"], []).append(line)
    if not by_name:
        raise ValueError(f"sweep {sweep}: no run {name} on {gpu} is recorded")
    return [_run(by_name[run]) for run in sorted(by_name)]


def _run(lines: Sequence[Line]) -> Run:
    newest = [line for line in lines if line["commit"] == lines[-1]["commit"]]
    by_metric: dict[str, dict[int, float]] = {}
    for line in sorted(newest, key=lambda line: line["case"]["step"]):
        by_metric.setdefault(line["metric"], {})[line["case"]["step"]] = line["value"]
    return Run(max((line["case"] for line in newest), key=lambda case: case["step"]), by_metric)
