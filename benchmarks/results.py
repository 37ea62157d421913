"""Selects records of results.jsonl for tables and figures: of one FFN, and of the two formats.

The newest record of a case counts; for single GPUs the CPU does not matter. Speed is shown of one
kind of GPU, `GPU`; records of others stay in the file. Figures and tables use the same selection.
`train_results` and `sweep_results` select whole trainings and sweeps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from sparsellm.runs.files import read_json_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]  # a line of results.jsonl
Metrics = dict[str, Line]  # the newest line of each metric
Drawn = tuple["Figure", list[Line]]  # a figure, and the records that it shows

# Keys of a case that describe its outcome and do not identify it.
OUTCOMES = ("measured_nnz", "union_64", "path")
FOLDER = Path(__file__).resolve().parent
RECORDS = FOLDER / "results.jsonl"
GPU = "NVIDIA H200"
TOKENS, HIDDEN, WIDTH = 16_384, 2048, 5632  # of the FFN in figures and tables


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


def newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest record of each benchmark, case, metric and hardware, where the first stood."""
    found = {}
    for record in records:
        which = (record["bench"], case_text(record["case"]), record["metric"], record["hardware"])
        found[which] = record
    return list(found.values())


def case_text(case: dict[str, Any]) -> str:
    """The case without its outcomes: equal for records of the same case."""
    return json.dumps({k: v for k, v in case.items() if k not in OUTCOMES}, sort_keys=True)


def devices(line: Line) -> str:
    """Number and name of the GPUs, such as ``1× NVIDIA H200``, without the CPU's cores."""
    return line["hardware"].partition(",")[0]


def gpu_of(line: Line) -> str | None:
    """The kind of GPU, such as ``NVIDIA H200``; None for a CPU."""
    kind = devices(line).rpartition("× ")[2]
    return kind if kind.startswith("NVIDIA ") else None


def taken_on(lines: Iterable[Line], *, commits: bool = True) -> str:
    """GPUs that were used, and the commits of some lines, newest first."""
    found = sorted(lines, key=lambda line: line["date"], reverse=True)
    # A training on one GPU may have been recorded on a machine of several.
    counts = sorted(
        {f"{line['case'].get('gpus', devices(line).partition('×')[0])}×" for line in found}
    )
    kinds = dict.fromkeys(gpu_of(line) or devices(line) for line in found)
    gpus = f"{', '.join(counts)} {', '.join(kinds)}"
    if not commits:
        return gpus
    names = list(dict.fromkeys(line["commit"] for line in found))
    return f"{gpus} · commit{'s' if names[1:] else ''} {', '.join(names)}"


def of_bench(lines: Iterable[Line], bench: str, count: int | None = 1) -> list[Line]:
    """Lines of a benchmark on ``count`` GPUs of the kind `GPU`, or on any number of them."""
    wanted = [line for line in lines if line["bench"] == bench]
    if count is None:
        return [line for line in wanted if gpu_of(line) == GPU]
    return [line for line in wanted if devices(line) == f"{count}× {GPU}"]


# --- one FFN --------------------------------------------------------------------------------------


class FFNSetting(NamedTuple):
    """An FFN, a pattern, and how ours computed it."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    pattern: str
    nnz: float
    layer: int | str | None  # of a trace
    in_token_order: bool
    launch: str | None  # graph: of few tokens, or of a training without the host's time
    format: str  # union or twell
    precision: str  # of the gate's product: bf16 or fp8

    @property
    def name(self) -> str:
        """The pattern, as tables name it."""
        name = self.pattern
        if self.layer is not None:
            mean = self.layer == "mean"
            name = "traces, mean of the layers" if mean else f"traces, layer {self.layer}"
        order = ", token order" if self.in_token_order else ""
        return name + order + (", FP8" if self.precision == "fp8" else "")


def _setting(case: dict[str, Any]) -> FFNSetting:
    return FFNSetting(
        case["M"],
        case["K"],
        case["N"],
        case["pattern"],
        case["nnz"],
        case.get("layer"),
        "token_order" in case,
        case.get("launch"),
        case.get("format", "union"),
        case.get("precision", "bf16"),
    )


def ffn(lines: Iterable[Line], bench: str) -> dict[FFNSetting, Metrics]:
    """The newest line of each setting and metric: ``ffn_forward``, ``ffn_decode`` or ``ffn_train``.

    Kernels of an architecture other than the GPU's best are omitted.
    """
    found: dict[FFNSetting, Metrics] = defaultdict(dict)
    for line in of_bench(lines, bench):
        if "arch" not in line["case"]:
            found[_setting(line["case"])][line["metric"]] = line
    return dict(found)


def shown_shape(setting: FFNSetting) -> bool:
    """Whether the setting has the shape that figures and tables show."""
    return setting[:3] == (TOKENS, HIDDEN, WIDTH)


class FormatPair(NamedTuple):
    """Both formats at one setting, measured in one run."""

    setting: FFNSetting  # of the union
    union: Metrics
    twell: Metrics


def format_pairs(lines: Sequence[Line], bench: str) -> dict[FFNSetting, FormatPair]:
    """The newest run of each setting in which both formats were measured."""
    runs: dict[tuple[FFNSetting, str, str, str], dict[str, Metrics]] = defaultdict(dict)
    for line in of_bench(lines, bench):
        if "arch" in line["case"]:
            continue
        setting = _setting(line["case"])
        of = (line["hardware"], line["commit"], line["command"])
        run = runs[setting._replace(format="union"), *of]
        run.setdefault(setting.format, {})[line["metric"]] = line
    return {
        setting: FormatPair(setting, run["union"], run["twell"])
        for (setting, *_), run in runs.items()
        if {"union", "twell"} <= run.keys()
    }
