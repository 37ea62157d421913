"""PNG plots of one run from its metrics: loss, sparsity over training, layers and positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sparsellm.recipe import Recipe
from sparsellm.report import drawing
from sparsellm.report.collect import Records, read_recipe
from sparsellm.runs.metrics import mean
from sparsellm.runs.records import nnz_bucket_edges, position_bucket_starts, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (12, 7.5)  # inches


def plot_run(run_path: Path) -> list[Path]:
    """Writes ``<run>/plots/training.png`` and ``sparsity.png``.

    Raises:
        FileNotFoundError: the folder is not a run, or its recipe is missing.
        ValueError: the run has no record yet, or a file of it is damaged.
    """
    records = read_metrics(run_path)
    train = [r for r in records if r["kind"] == "train"]
    if not train:
        raise ValueError(f"{run_path}: nothing was logged yet, so there is nothing to plot")
    validation = [r for r in records if r["kind"] == "validation"]
    return save_plots(run_path, read_recipe(run_path), train, validation)


def save_plots(run_path: Path, recipe: Recipe, train: Records, validation: Records) -> list[Path]:
    """Writes the plots of `plot_run` from what was read of the run."""
    folder = run_path / "plots"
    folder.mkdir(exist_ok=True)
    with drawing.style():
        figures = {
            "training.png": _training_figure(recipe, train, validation),
            "sparsity.png": _sparsity_figure(recipe, train),
        }
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=150)
    return [folder / name for name in figures]


def _training_figure(recipe: Recipe, train: Records, validation: Records) -> Figure:
    figure, (loss, sparsity, l1, speed) = drawing.new_figure(
        2, 2, size=SIZE, title=f"{recipe.name}: training"
    )
    tokens = [r["tokens"] for r in train]
    loss.plot(
        tokens, [math.nan if r["loss"] is None else r["loss"] for r in train], label="training"
    )
    if validation:
        points = [(r["tokens"], r["loss"]) for r in validation]
        loss.plot(*zip(*points, strict=True), "o-", label="validation")
    loss.legend()
    drawing.label(loss, "Cross-entropy", "training tokens", "nats per token")

    n = recipe.model.intermediate_size
    nnz = [mean(r["sparsity"]["nnz_mean"]) for r in train]
    sparsity.plot(tokens, [100 * value / n for value in nnz], label="active neurons")
    dead = [100 * mean(r["sparsity"]["dead_fraction"]) for r in train]
    sparsity.plot(tokens, dead, label="dead neurons")
    drawing.log_scale(sparsity.yaxis, linear_below=0.1)
    sparsity.legend()
    drawing.label(sparsity, "Sparsity, mean over layers", "training tokens", f"% of {n:,} neurons")

    l1.plot(tokens, [r.get("l1", math.nan) for r in train])
    drawing.log_scale(l1.yaxis)
    drawing.label(
        l1, "L1 of the activations", "training tokens", "Σ|h|, mean over tokens and layers"
    )

    speed.plot(tokens, [r.get("tokens_per_second", math.nan) / 1e3 for r in train])
    speed.set_ylim(bottom=0)
    drawing.label(speed, "Throughput, all ranks", "training tokens", "thousand tokens per second")
    return figure


def _sparsity_figure(recipe: Recipe, train: Records) -> Figure:
    figure, (nnz, dead, position, histogram) = drawing.new_figure(
        2, 2, size=SIZE, title=f"{recipe.name}: sparsity"
    )
    tokens = [r["tokens"] for r in train]
    _heatmap(figure, nnz, tokens, [r["sparsity"]["nnz_mean"] for r in train], log=True)
    drawing.label(nnz, "Non-zeros per token", "training tokens", "layer")
    dead_percent = [[100 * v for v in r["sparsity"]["dead_fraction"]] for r in train]
    _heatmap(figure, dead, tokens, dead_percent, log=False)
    drawing.label(dead, "Dead neurons, %", "training tokens", "layer")

    starts = position_bucket_starts(recipe.model.context_length)
    by_position = train[-1]["sparsity"]["nnz_by_position"]
    for layer, values in enumerate(by_position):
        label = f"layer {layer}" if layer in _named_layers(len(by_position)) else None
        color = drawing.shade(layer, len(by_position))
        position.plot([start + 1 for start in starts], values, color=color, label=label)
    position.legend(fontsize="small", ncols=2)
    drawing.log_scale(position.xaxis)
    drawing.log_scale(position.yaxis, linear_below=1)
    title = "By position, last record (a line per layer)"
    drawing.label(position, title, "position in the sequence, from 1", "non-zeros per token")

    edges = nnz_bucket_edges(recipe.model.intermediate_size)
    counts = train[-1]["sparsity"]["nnz_histogram"]
    total = sum(counts)
    widths = [right - left for left, right in zip(edges, [*edges[1:], edges[-1] + 1], strict=True)]
    density = [count / total / width for count, width in zip(counts, widths, strict=True)]
    histogram.step(edges, density, where="post")
    drawing.log_scale(histogram.xaxis, linear_below=1)
    drawing.log_scale(histogram.yaxis)
    title = "Tokens by non-zeros, last record, all layers"
    drawing.label(histogram, title, "non-zeros per token", "share per non-zero")
    return figure


def _heatmap(
    figure: Figure, axes: Axes, tokens: list[int], rows: list[list[float]], *, log: bool
) -> None:
    from matplotlib.colors import LogNorm, Normalize

    layers = list(range(max(map(len, rows))))
    # A record that is older than the statistic leaves a gap.
    values = [[row[layer] if row else math.nan for row in rows] for layer in layers]
    if len(tokens) == 1:  # a mesh needs at least two columns
        tokens, values = [0, *tokens], [[v[0], v[0]] for v in values]
    norm: Normalize = Normalize(0, max([1.0, *(v for line in values for v in line if v > 0)]))
    if log:
        values = [[max(v, 0.1) for v in line] for line in values]
        norm = LogNorm()
    mesh = axes.pcolormesh(tokens, layers, values, norm=norm, shading="nearest")
    axes.set_yticks(layers[:: max(1, len(layers) // 10)])
    bar = figure.colorbar(mesh, ax=axes)
    if log:
        drawing.plain_numbers(bar.ax.yaxis)


def _named_layers(count: int) -> set[int]:
    """Up to eight layers for a legend, including the first and the last."""
    most = min(count, 8)
    return {round(i * (count - 1) / max(most - 1, 1)) for i in range(most)}
