"""Selects records of results.jsonl for tables and figures: FFNs, formats, trainings, sweeps.

The newest record of a case counts; for single GPUs the CPU does not matter. Only records of `GPU`
are shown; those of other GPUs stay in the file. Figures and tables use the same selection.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsellm.bench.record import OUTCOMES, case_text
from sparsellm.report.published import PAPER_MODELS

Line = dict[str, Any]  # a line of results.jsonl
Metrics = dict[str, Line]  # the newest line of each metric

GPU = "NVIDIA H200"
TOKENS, HIDDEN, WIDTH = 16_384, 2048, 5632  # of the FFN in figures and tables


def devices(line: Line) -> str:
    """Number and name of the GPUs, such as ``1× NVIDIA H200``, without the CPU's cores."""
    return line["hardware"].partition(",")[0]


def taken_on(lines: Iterable[Line]) -> str:
    """Hardware and commits of some lines, newest first."""
    found = sorted(lines, key=lambda line: line["date"], reverse=True)
    counts = sorted({devices(line).partition(" ")[0] for line in found})
    commits = list(dict.fromkeys(line["commit"] for line in found))
    many = "s" if commits[1:] else ""
    return f"{', '.join(counts)} {GPU} · commit{many} {', '.join(commits)}"


def _of(lines: Iterable[Line], bench: str, count: int | None = 1) -> list[Line]:
    """Lines of a benchmark on ``count`` GPUs of the kind `GPU`, or on any number of them."""
    wanted = [line for line in lines if line["bench"] == bench]
    if count is None:
        return [line for line in wanted if devices(line).endswith(f"× {GPU}")]
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
    launch: str | None  # way to launch few tokens
    format: str  # union or twell

    @property
    def name(self) -> str:
        """The pattern, as tables name it."""
        name = self.pattern
        if self.layer is not None:
            mean = self.layer == "mean"
            name = "traces, mean of the layers" if mean else f"traces, layer {self.layer}"
        return f"{name}, token order" if self.in_token_order else name


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
    )


def ffn(lines: Iterable[Line], bench: str) -> dict[FFNSetting, Metrics]:
    """The newest line of each setting and metric: ``ffn_forward``, ``ffn_decode`` or ``ffn_train``.

    Kernels of an architecture other than the GPU's best are omitted.
    """
    found: dict[FFNSetting, Metrics] = defaultdict(dict)
    for line in _of(lines, bench):
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
    runs: dict[tuple[FFNSetting, str, str], dict[str, Metrics]] = defaultdict(dict)
    for line in _of(lines, bench):
        if "arch" in line["case"]:
            continue
        setting = _setting(line["case"])
        run = runs[setting._replace(format="union"), line["hardware"], line["commit"]]
        run.setdefault(setting.format, {})[line["metric"]] = line
    return {
        setting: FormatPair(setting, run["union"], run["twell"])
        for (setting, *_), run in runs.items()
        if {"union", "twell"} <= run.keys()
    }


# --- whole models ---------------------------------------------------------------------------------


class TrainPair(NamedTuple):
    """A dense and a sparse training run of one commit and machine."""

    recipe: str
    gpus: int
    config: str
    micro_batch_size: int
    global_batch_tokens: int
    format: str  # of the sparse side
    in_token_order: bool  # likewise
    fused_gradients: bool  # runtime.weight_gradients of both sides
    dense: Metrics
    sparse: Metrics

    @property
    def is_plain(self) -> bool:
        """The union in the order of the text, with autograd's weight gradients."""
        return self.format == "union" and not self.in_token_order and not self.fused_gradients

    @property
    def lines(self) -> list[Line]:
        """All its records."""
        return [*self.dense.values(), *self.sparse.values()]

    def values(self, metric: str) -> tuple[float | None, float | None]:
        """Dense and sparse value of a metric; None if it was not measured."""
        dense, sparse = (side.get(metric, {}).get("value") for side in (self.dense, self.sparse))
        return dense, sparse


_OF_SPARSE = ("kernels", "format", "token_order")  # keys in which dense runs do not differ


def train_pairs(lines: Sequence[Line]) -> list[TrainPair]:
    """The newest pair per recipe, GPUs, launch configuration, micro-batch and variant."""
    runs: dict[tuple[str, str, str], dict[tuple[str, bool] | None, Metrics]] = defaultdict(dict)
    cases = {}
    for line in _of(lines, "train", None):
        if "vocab_size" in line["case"]:
            continue  # another model
        case = {k: v for k, v in line["case"].items() if k not in (*_OF_SPARSE, *OUTCOMES)}
        key = (case_text(case), line["hardware"], line["commit"])
        cases[key] = case
        side = None  # dense
        if line["case"]["kernels"] != "dense":
            side = (line["case"].get("format", "union"), line["case"].get("token_order") == "auto")
        runs[key].setdefault(side, {})[line["metric"]] = line
    found = {}
    for key, sides in runs.items():
        case, dense = cases[key], sides.get(None, {})
        for side, sparse in sides.items():
            if side and "tokens_per_ms" in dense and "tokens_per_ms" in sparse:
                pair = TrainPair(
                    case["recipe"],
                    case["gpus"],
                    case["config"],
                    case["micro_batch_size"],
                    case["global_batch_tokens"],
                    *side,
                    case.get("weight_gradients") == "fused",
                    dense,
                    sparse,
                )
                found[*pair[:4], *pair[5:8]] = pair  # whatever the tokens per step
    return sorted(
        found.values(),
        key=lambda p: (size_of(p.recipe), p.gpus, p.config, p.micro_batch_size, p[5:8]),
    )


def model_forwards(lines: Iterable[Line]) -> dict[str, Metrics]:
    """The newest forward of each of the paper's sizes on one GPU, in the order of the text."""
    found: dict[str, Metrics] = {}
    last = ""
    for line in _of(lines, "model_forward"):
        case = line["case"]
        sizes = {model.layers: model.name for model in PAPER_MODELS}
        name = sizes.get(case["layers"]) if case.get("K", HIDDEN) == HIDDEN else None
        if name is None or "token_order" in case or "format" in case:
            continue
        if case_text(case) != last:  # a new case begins: its metrics belong together
            found.pop(name, None)
        found.setdefault(name, {})[line["metric"]] = line
        last = case_text(case)
    return found


def size_of(recipe: str) -> float:
    """Billions of parameters from a recipe's name; infinite, hence last, if it has none."""
    number = re.fullmatch(r"([\d.]+)b", recipe)
    return float(number[1]) if number else float("inf")


def size_name(recipe: str) -> str:
    """The size in a recipe's name, such as ``0.5B``."""
    return recipe[:-1] + "B" if size_of(recipe) < float("inf") else recipe


# --- sweeps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepGroup:
    """Runs of a sweep that differ only in their seed; lists have one value per seed."""

    sweep: str
    name: str
    case: dict[str, Any]  # of one of them
    nnz: list[float]  # at the last step, non-zeros per token
    losses: list[float]  # held out, nats per token
    rates: list[float]  # tokens/s, median over the second half of the recorded steps
    dead: list[float]
    scores: list[float]  # mean over the tasks; not of limited rows
    lines: list[Line]

    @property
    def size(self) -> tuple[int, int, int]:
        """Layers, model width and training tokens: only equal ones are compared."""
        return self.case["layers"], self.case["hidden_size"], self.case["tokens"]

    @property
    def is_dense_relu(self) -> bool:
        """Whether it is gated and without L1: the baseline of sparse groups."""
        case = self.case
        plain = not case["l1_coefficient"] and not case.get("target_nnz")
        return plain and case.get("activation", "relu") == "relu" and case.get("gated", True)


def sweep_groups(lines: Sequence[Line]) -> list[SweepGroup]:
    """The groups of every benchmark ``sweep_…``, which `sparsellm bench sweep` records."""
    by_run: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if line["bench"].startswith("sweep_") and devices(line).endswith(f"× {GPU}"):
            run = line["case"].get("run", line["case"].get("recipe"))
            by_run[line["bench"].removeprefix("sweep_"), run].append(line)
    groups: dict[tuple[str, str], list[list[Line]]] = defaultdict(list)
    for (sweep, run), found in by_run.items():
        own = [line for line in found if line["commit"] == found[-1]["commit"]]
        groups[sweep, re.sub(r"-seed\d+$", "", run)].append(own)
    return [_group(sweep, name, members) for (sweep, name), members in groups.items()]


def _group(sweep: str, name: str, members: list[list[Line]]) -> SweepGroup:
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
        max((line["case"] for line in lines), key=lambda case: case["step"]),
        nnz=each("nnz", lambda values: values[-1]),
        losses=each("validation_loss", lambda values: values[-1]),
        rates=each("throughput", lambda values: statistics.median(values[len(values) // 2 :])),
        dead=each("dead_fraction", lambda values: values[-1]),
        scores=each("score_mean", lambda values: values[-1]),
        lines=lines,
    )


def dense_relu_losses(groups: Iterable[SweepGroup]) -> dict[tuple[int, int, int], float]:
    """Mean held-out loss of dense ReLU for each `SweepGroup.size`."""
    losses: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for group in groups:
        if group.is_dense_relu:
            losses[group.size] += group.losses
    return {size: statistics.fmean(values) for size, values in losses.items() if values}
