"""The data of the page's charts as JSON, reduced to a number of points that a browser can draw."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from sparsellm.recipe import Recipe
from sparsellm.report.collect import Activity, Records, RunData
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, LayerMetric
from sparsellm.runs.telemetry.records import nnz_bucket_edges, position_bucket_starts

MAX_POINTS = 1000  # of a line; a long run has more records than a screen has columns
MAX_COLUMNS = 240  # of a heatmap
POPULARITY_POINTS = 80

Line = dict[str, Any]  # x and y, equally long, or a y for each of its layers


def run_series(run: RunData) -> dict[str, Any]:
    """All data of one run: lines over tokens, heatmaps, and curves of its last record.

    The scripts of the page read the keys; shares are fractions, sizes GiB, throughput tokens per
    second.
    """
    return {
        "label": run.label,
        "layers": run.recipe.model.num_hidden_layers,
        "lines": _over_tokens(run) | _at_the_last_record(run),
        "heat": _heat(run.train),
    }


def chart_specs(runs: list[RunData]) -> dict[str, list[dict[str, Any]]]:
    """What main.js draws over training tokens: `METRICS` as lines, `LAYER_METRICS` as heatmaps."""

    def is_drawn(metric: LayerMetric) -> bool:
        if not metric.if_different:
            return bool(metric.section)
        return any(len(set(metric.values(r))) > 1 for run in runs for r in run.train)

    drawn = ("section", "name", "title", "unit", "scale")
    lines = [m for m in METRICS if m.section]
    heatmaps = [m for m in LAYER_METRICS if is_drawn(m)]
    return {
        "metrics": [{key: getattr(m, key) for key in (*drawn, "from_zero")} for m in lines],
        "layerMetrics": [{key: getattr(m, key) for key in (*drawn, "floor")} for m in heatmaps],
    }


def _over_tokens(run: RunData) -> dict[str, Line]:
    drawn = [metric for metric in METRICS if metric.section]
    means = [(e, e.mean.value) for e in run.evaluations if e.mean]
    return {
        **{
            m.name: _line([(r["tokens"], m.value(r, run.recipe)) for r in run.train]) for m in drawn
        },
        **_predicted(run),
        "validation": _line([(r["tokens"], r["loss"]) for r in run.validation]),
        "evaluation": _line([(e.tokens, mean) for e, mean in means if not e.caveat]),
        "evaluation_limited": _line([(e.tokens, mean) for e, mean in means if e.caveat]),
    }


def _predicted(run: RunData) -> dict[str, Line]:
    """The predicted time of a step's FFNs in ms: on the paths that they took, and all dense.

    It follows from the measured costs of a layer, its union (TwELL: its non-zeros), and the number
    of micro-batches that a rank computes one after the other.
    """
    costs, recipe, ranks = run.costs, run.recipe, run.sessions[-1]["ranks"] if run.sessions else 1
    if costs is None:
        return dict.fromkeys(("predicted_ffn_ms", "predicted_dense_ms"), _line([]))
    chosen, dense = [], []
    for record in run.train:
        sequences = int(record.get("micro_batch_size") or recipe.train.micro_batch_size)
        at_once = sequences * recipe.model.context_length * ranks
        rounds = _tokens_a_step(record, recipe) / at_once
        dense.append((record["tokens"], rounds * costs.dense * recipe.model.num_hidden_layers))
        if "kernels" in record:
            neurons_L = record["kernels"]["union_mean"]
            if recipe.ffn.format == "twell":
                neurons_L = record["sparsity"]["nnz_mean"]
            layers = zip(neurons_L, record["kernels"]["sparse"], strict=True)
            ms = [costs.sparse(n) if sparse else costs.dense for n, sparse in layers]
            chosen.append((record["tokens"], rounds * sum(ms)))
    return {"predicted_ffn_ms": _line(chosen), "predicted_dense_ms": _line(dense)}


def _tokens_a_step(record: dict[str, Any], recipe: Recipe) -> float:
    """The recipe's, unless the run resumed with another number after this record."""
    throughput, step_ms = record.get("tokens_per_second"), record.get("step_ms")
    if throughput is None or step_ms is None:
        return recipe.train.global_batch_tokens
    return throughput * step_ms / 1e3  # type: ignore[no-any-return]


def _line(points: Sequence[tuple[int | None, float | None]]) -> Line:
    measured = [(x, y) for x, y in points if x is not None and y is not None]
    finite = [(x, y) for x, y in measured if math.isfinite(y)]
    shown = thin(finite, MAX_POINTS)
    return {"x": [x for x, _ in shown], "y": _rounded([y for _, y in shown])}


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most ``limit`` of the points: the lowest and highest of each stretch, and both ends.

    Spikes stay visible; a mean over each stretch would hide them.
    """
    if len(points) <= limit:
        return points
    inner = points[1:-1]
    stretches = (limit - 2) // 2
    edges = [len(inner) * i // stretches for i in range(stretches + 1)]
    chosen = {0, len(points) - 1}
    for begin, end in itertools.pairwise(edges):
        indices = range(begin, end)
        chosen.add(1 + min(indices, key=lambda i: inner[i][1]))
        chosen.add(1 + max(indices, key=lambda i: inner[i][1]))
    return [points[i] for i in sorted(chosen)]


def _heat(train: Records) -> dict[str, Any]:
    columns = min(len(train), MAX_COLUMNS)
    # Evenly spaced records, including both ends.
    chosen = [train[round(i * (len(train) - 1) / max(columns - 1, 1))] for i in range(columns)]
    heat = {
        m.name: [_rounded(m.values(record)) for record in chosen]
        for m in LAYER_METRICS
        if m.section
    }
    return {"x": [record["tokens"] for record in chosen], **heat}


def _at_the_last_record(run: RunData) -> dict[str, Line]:
    """Curves of the last record; without points where it is older than the statistic."""
    stats, model = run.train[-1]["sparsity"], run.recipe.model
    nnz = stats["nnz_by_position"]
    starts = position_bucket_starts(model.context_length) if any(nnz) else []
    return {
        "position": {"x": [s + 1 for s in starts], "layers": [_rounded(layer) for layer in nnz]},
        **_distribution(stats["nnz_histogram"], model.intermediate_size),
        "popularity": _popularity(run.activity) if run.activity else {"x": [], "layers": []},
    }


def _distribution(counts: list[int], width: int) -> dict[str, Line]:
    """Shares of (token, layer) pairs: by number of non-zeros, and with at least as many."""
    if not counts:
        return {name: {"x": [], "y": []} for name in ("distribution", "tail")}
    edges, total = [*nnz_bucket_edges(width), width + 1], sum(counts) or 1
    sizes = [right - left for left, right in itertools.pairwise(edges)]
    density = [count / total / size for count, size in zip(counts, sizes, strict=True)]
    tail = [(total - fewer) / total for fewer in itertools.accumulate(counts, initial=0)]
    return {
        "distribution": {"x": edges, "y": [*_rounded(density), 0.0]},
        "tail": {"x": edges, "y": _rounded(tail)},
    }


def _popularity(activity: Activity) -> Line:
    """The share of a layer's activations that its k most active neurons have, for k up to N."""
    num_neurons = activity.active_LN.shape[1]
    spread = [num_neurons ** (i / (POPULARITY_POINTS - 1)) for i in range(POPULARITY_POINTS)]
    ks = sorted({round(k) for k in spread})
    sorted_LN = activity.active_LN.double().sort(dim=1, descending=True).values
    cumulative_LN = sorted_LN.cumsum(1)
    share_LN = cumulative_LN / cumulative_LN[:, -1:].clamp(min=1)
    at_LK = share_LN[:, [k - 1 for k in ks]]
    return {
        "x": _rounded([k / num_neurons for k in ks]),
        "layers": [_rounded(row) for row in at_LK.tolist()],
        "tokens": activity.tokens,
        "step": activity.step,
    }


def _rounded(values: list[float]) -> list[float]:
    """Rounds to five digits: more cannot be seen, and the page stays small."""
    return [float(f"{value:.5g}") for value in values]
