"""Selects records of whole models: dense and sparse trainings of one run, and forwards."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from published import PAPER_MODELS
from results import HIDDEN, OUTCOMES, Line, Metrics, case_text, of_bench


class TrainPair(NamedTuple):
    """A dense and a sparse training, measured by one command on one machine."""

    recipe: str
    gpus: int
    config: str
    micro_batch_size: int
    precision: str  # of both sides
    global_batch_tokens: int
    format: str  # of the sparse side
    in_token_order: bool  # likewise
    fused_gradients: bool  # runtime.weight_gradients of both sides
    dense: Metrics
    sparse: Metrics

    @property
    def lines(self) -> list[Line]:
        """All its records."""
        return [*self.dense.values(), *self.sparse.values()]

    def values(self, metric: str) -> tuple[float | None, float | None]:
        """Dense and sparse value of a metric; None if it was not measured."""
        dense, sparse = (side.get(metric, {}).get("value") for side in (self.dense, self.sparse))
        return dense, sparse


_Run = tuple[str, str, str, str]  # case without the side, hardware, commit, command
_Side = tuple[str, bool] | None  # format and token order, or None for dense
_OF_SPARSE = ("kernels", "format", "token_order")  # keys in which dense runs do not differ


def train_pairs(lines: Sequence[Line]) -> list[TrainPair]:
    """The newest pair per recipe, GPUs, launch configuration, micro-batch and variant."""
    # Whatever the tokens per step.
    found = {(*pair[:5], *pair[6:9]): pair for pair in every_pair(lines)}
    return sorted(
        found.values(),
        key=lambda p: (size_of(p.recipe), *p[1:5], p[6:9]),
    )


def every_pair(lines: Iterable[Line]) -> list[TrainPair]:
    """Each sparse training with the dense one that the same command measured, oldest first."""
    runs: dict[_Run, dict[_Side, Metrics]] = defaultdict(dict)
    cases: dict[_Run, dict[str, Any]] = {}
    for line in of_bench(lines, "train", None):
        if "vocab_size" in line["case"]:
            continue  # another model
        case = {k: v for k, v in line["case"].items() if k not in (*_OF_SPARSE, *OUTCOMES)}
        key = (case_text(case), line["hardware"], line["commit"], line["command"])
        cases[key] = case
        side: _Side = None
        if line["case"]["kernels"] != "dense":
            side = (line["case"].get("format", "union"), line["case"].get("token_order") == "auto")
        runs[key].setdefault(side, {})[line["metric"]] = line
    return [
        TrainPair(
            cases[key]["recipe"],
            cases[key]["gpus"],
            cases[key]["config"],
            cases[key]["micro_batch_size"],
            cases[key].get("precision", "bf16"),
            cases[key]["global_batch_tokens"],
            *side,
            cases[key].get("weight_gradients") == "fused",
            sides[None],
            sparse,
        )
        for key, sides in runs.items()
        for side, sparse in sides.items()
        if side and "tokens_per_ms" in sides.get(None, {}) and "tokens_per_ms" in sparse
    ]


def default_pairs(lines: Sequence[Line]) -> list[TrainPair]:
    """The union's pair nearest the defaults, for each of the first five fields of `TrainPair`.

    The defaults are token order and autograd's weight gradients.
    """
    nearest: dict[tuple[object, ...], TrainPair] = {}
    for pair in train_pairs(lines):
        if pair.format == "union":
            other = nearest.get(pair[:5], pair)
            nearest[pair[:5]] = max(
                other, pair, key=lambda p: (p.in_token_order, not p.fused_gradients)
            )
    return list(nearest.values())


def model_forwards(lines: Iterable[Line]) -> dict[tuple[str, str], Metrics]:
    """The newest forward of each of the paper's sizes on one GPU, in token order if measured.

    By size and precision, which is that of the sparse side; dense is bf16.
    """
    found: dict[tuple[str, str, bool], Metrics] = {}
    last = ""
    for line in of_bench(lines, "model_forward"):
        case = line["case"]
        sizes = {model.layers: model.name for model in PAPER_MODELS}
        name = sizes.get(case["layers"]) if case.get("K", HIDDEN) == HIDDEN else None
        if name is None or "format" in case:
            continue
        key = name, case.get("precision", "bf16"), "token_order" in case
        if case_text(case) != last:  # a new case begins: its metrics belong together
            found.pop(key, None)
        found.setdefault(key, {})[line["metric"]] = line
        last = case_text(case)
    return {key[:2]: found[key] for key in sorted(found)}


def size_of(recipe: str) -> float:
    """Billions of parameters from a recipe's name; infinite, hence last, if it has none."""
    number = re.fullmatch(r"([\d.]+)b", recipe)
    return float(number[1]) if number else float("inf")


def size_name(recipe: str) -> str:
    """The size in a recipe's name, such as ``0.5B``."""
    return recipe[:-1] + "B" if size_of(recipe) < float("inf") else recipe
