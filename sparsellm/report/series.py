"""The data of the page's charts as JSON, reduced to a number of points that a browser can draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from sparsellm.report.collect import Activity, Records, RunData
from sparsellm.runs.evaluations import Evaluation
from sparsellm.runs.metrics import LAYER_METRICS, METRICS, Metric
from sparsellm.runs.records import nnz_bucket_edges, position_bucket_starts

MAX_POINTS = 1000  # of a line; a long run has more records than a screen has columns
MAX_COLUMNS = 240  # of a heatmap
POPULARITY_POINTS = 80

Line = dict[str, list[Any]]  # x and y, equally long


def run_series(run: RunData) -> dict[str, Any]:
    """All data of one run: lines over tokens, heatmaps, and curves of its last record.

    Keys are read by charts.js, main.js; shares are fractions, sizes GiB, rates tokens a second.
    """
    last = run.train[-1]
    return {
        "label": run.label,
        "layers": run.recipe.model.num_hidden_layers,
        "width": run.recipe.model.intermediate_size,
        "step": last["step"],
        "lines": _lines(run),
        "heat": _heat(run.train),
        "position": {
            "x": [s + 1 for s in position_bucket_starts(run.recipe.model.context_length)],
            "layers": [_rounded(layer) for layer in last["sparsity"]["nnz_by_position"]],
        },
        "distribution": _distribution(
            last["sparsity"]["nnz_histogram"], run.recipe.model.intermediate_size
        ),
        "popularity": _popularity(run.activity) if run.activity else None,
    }


def chart_specs() -> dict[str, list[dict[str, Any]]]:
    """What main.js draws of `METRICS` as lines and of `LAYER_METRICS` as heatmaps, in order."""
    lines = [
        {
            "name": metric.name,
            "title": metric.title,
            "unit": metric.unit,
            "section": metric.section,
            "scale": metric.scale,
            "fromZero": metric.from_zero,
        }
        for metric in METRICS
        if metric.section
    ]
    heatmaps = [
        {
            "name": metric.name,
            "title": metric.title,
            "unit": metric.unit,
            "section": metric.section,
            "scale": metric.scale,
            "floor": metric.floor,
        }
        for metric in LAYER_METRICS
        if metric.section
    ]
    return {"lines": lines, "heatmaps": heatmaps}


def _lines(run: RunData) -> dict[str, Line]:
    def of(metric: Metric) -> Callable[[dict[str, Any]], float | None]:
        return lambda record: metric.value(record, run.recipe)

    lines = {metric.name: _line(run.train, of(metric)) for metric in METRICS if metric.section}
    lines["validation"] = _line(run.validation, lambda r: r["loss"])
    lines["evaluation"] = _mean_scores([e for e in run.evaluations if not e.caveat])
    lines["evaluation_limited"] = _mean_scores([e for e in run.evaluations if e.caveat])
    return lines


def _mean_scores(evaluations: list[Evaluation]) -> Line:
    scored = [(e.tokens, e.mean.value) for e in evaluations if e.mean and e.tokens is not None]
    return {"x": [x for x, _ in scored], "y": _rounded([y for _, y in scored])}


def _line(records: Records, value: Callable[[dict[str, Any]], float | None]) -> Line:
    points = [(record["tokens"], value(record)) for record in records]
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    kept = thin(finite, MAX_POINTS)
    return {"x": [x for x, _ in kept], "y": _rounded([y for _, y in kept])}


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most ``limit`` of the points: the lowest and highest of each stretch, and both ends.

    Spikes stay visible; a mean over each stretch would hide them.
    """
    if len(points) <= limit:
        return points
    inner = points[1:-1]
    stretches = (limit - 2) // 2
    edges = [len(inner) * i // stretches for i in range(stretches + 1)]
    kept = {0, len(points) - 1}
    for begin, end in itertools.pairwise(edges):
        indices = range(begin, end)
        kept.add(1 + min(indices, key=lambda i: inner[i][1]))
        kept.add(1 + max(indices, key=lambda i: inner[i][1]))
    return [points[i] for i in sorted(kept)]


def _heat(train: Records) -> dict[str, Any]:
    columns = min(len(train), MAX_COLUMNS)
    # Evenly over the records, both ends included.
    chosen = [train[round(i * (len(train) - 1) / max(columns - 1, 1))] for i in range(columns)]
    heat = {
        m.name: [_rounded(m.values(record)) for record in chosen]
        for m in LAYER_METRICS
        if m.section
    }
    return {"x": [record["tokens"] for record in chosen], **heat}


def _distribution(counts: list[int], width: int) -> dict[str, list[float]]:
    """Of (token, layer) pairs by their non-zeros: share a non-zero, and share that has as many."""
    edges = nnz_bucket_edges(width)
    total = sum(counts) or 1
    sizes = [right - left for left, right in zip(edges, [*edges[1:], width + 1], strict=True)]
    left = total
    tail = []
    for count in counts:
        tail.append(left / total)
        left -= count
    density = [count / total / size for count, size in zip(counts, sizes, strict=True)]
    return {"x": [*edges, width + 1], "density": _rounded(density), "tail": _rounded(tail)}


def _popularity(activity: Activity) -> dict[str, Any]:
    """Share of a layer's activations carried by its k most active neurons, for k up to N."""
    num_neurons = activity.fired_LN.shape[1]
    spread = [num_neurons ** (i / (POPULARITY_POINTS - 1)) for i in range(POPULARITY_POINTS)]
    ks = sorted({round(k) for k in spread})
    sorted_LN = activity.fired_LN.double().sort(dim=1, descending=True).values
    cumulative_LN = sorted_LN.cumsum(1)
    share_LN = cumulative_LN / cumulative_LN[:, -1:].clamp(min=1)
    at_LK = share_LN[:, torch.tensor(ks) - 1]
    return {
        "x": _rounded([k / num_neurons for k in ks]),
        "layers": [_rounded(row) for row in at_LK.tolist()],
        "tokens": activity.tokens,
        "step": activity.step,
    }


def _rounded(values: list[float]) -> list[float]:
    """Rounds to five digits: more cannot be seen, and the page stays small."""
    return [float(f"{value:.5g}") for value in values]
