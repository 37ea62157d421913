"""The metrics of a training step: one entry each, from which everything that shows it follows.

A metric is a number that `training.step.train_step` or `training.meter.Meter` puts under its name
into the step's values, or one that is derived from a record. Its entry makes it part of wandb, of
the progress line and of the report's charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sparsellm.recipe import Recipe

Scale = Literal["linear", "log"]
Section = Literal["training", "sparsity", "speed", "kernels"]
Line = dict[str, Any]  # of metrics.jsonl, of kind `train`


@dataclass(frozen=True)
class Metric:
    """One number per step.

    Args:
        name: its key in metrics.jsonl.
        title: heading where it is drawn.
        unit: unit of its values.
        of: derives it from a line and the recipe; None: the line has it under ``name``.
        wandb: its key in wandb; None: ``train/<name>``.
        progress: how the progress line shows a value, such as ``loss {:.4f}``; "": not shown.
        section: section of the report that draws it over the training tokens; "": not drawn.
        scale: scale of its axis.
        from_zero: the axis begins at zero.
    """

    name: str
    title: str
    unit: str
    of: Callable[[Line, Recipe], float | None] | None = None
    wandb: str | None = None
    progress: str | Callable[[float], str] = ""
    section: Section | Literal[""] = ""
    scale: Scale = "linear"
    from_zero: bool = False

    def value(self, line: Line, recipe: Recipe) -> float | None:
        """Of a line; None where the line was written before there was this metric."""
        try:
            found = line[self.name] if self.of is None else self.of(line, recipe)
        except (KeyError, TypeError):  # it, or what it derives from, is not there
            return None
        return None if found is None or math.isnan(found) else float(found)

    @property
    def wandb_key(self) -> str:
        """Its name in wandb."""
        return self.wandb or f"train/{self.name}"

    def text(self, value: float) -> str:
        """Its part of the progress line."""
        return self.progress(value) if callable(self.progress) else self.progress.format(value)


@dataclass(frozen=True)
class LayerMetric:
    """One number per layer and step.

    Args:
        name: makes its key in wandb, ``layers/<name>/<layer>``.
        title: heading where it is drawn.
        of: the values of a line, one per layer.
        histogram: wandb's key of the values as bins of a histogram, which wandb draws as a heatmap
            over training; None is none.
        section: of the report, which draws it as a heatmap over layers and training tokens.
        unit: of its values, in the heatmap.
        scale: of the heatmap's colours.
        floor: the lowest value that a logarithmic scale tells from zero.
        if_different: the report draws it only where the layers of some record differ.
    """

    name: str
    title: str
    of: Callable[[Line], list[float]]
    histogram: str | None = None
    section: Section | Literal[""] = ""
    unit: str = ""
    scale: Scale = "log"
    floor: float = 0.1
    if_different: bool = False  # drawn only where layers differ

    def values(self, line: Line) -> list[float]:
        """Of a line, one per layer; none where the line is older than this metric."""
        try:
            return self.of(line)
        except KeyError:
            return []


def mean(values: list[float]) -> float:
    """The arithmetic mean; NaN of an empty list, as in a line older than the statistic."""
    return sum(values) / len(values) if values else math.nan


def _nnz(line: Line, recipe: Recipe) -> float:
    return mean(line["sparsity"]["nnz_mean"])


def _si(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


METRICS = (
    Metric("loss", "Cross-entropy", "nats per token", progress="loss {:.4f}", section="training"),
    Metric(
        "l1",
        "L1 of the activations",
        "Σ|h|, mean over tokens and layers",
        progress="l1 {:.3g}",
        section="training",
        scale="log",
    ),
    Metric(
        "l1_coefficient",
        "L1 coefficient λ",
        "λ on the sum over hidden units",
        section="training",
        from_zero=True,
    ),
    Metric(
        "target_error",
        "Active neurons against the target",
        "over sparsity.target_nnz, less one",
        progress="off target {:+.1%}",
        section="sparsity",
    ),
    Metric("learning_rate", "Learning rate", "learning rate", section="training", from_zero=True),
    Metric(
        "grad_norm",
        "Gradient norm",
        "global norm before clipping",
        section="training",
        scale="log",
    ),
    Metric(
        "skipped_steps",
        "Steps skipped so far",
        "steps",
        progress=lambda value: f"{value:.0f} skipped" if value else "",
        section="training",
        from_zero=True,
    ),
    Metric(
        "nnz",
        "Active neurons, mean over layers",
        "neurons per token",
        of=_nnz,
        wandb="sparsity/nnz",
        progress="nnz {:.1f}",
        section="sparsity",
        scale="log",
        from_zero=True,
    ),
    Metric(
        "nnz_fraction",
        "Active neurons, share of the width",
        "fraction",
        of=lambda line, recipe: _nnz(line, recipe) / recipe.model.intermediate_size,
        wandb="sparsity/nnz_fraction",
        progress="({:.2%})",
    ),
    Metric(
        "dead_fraction",
        "Dead neurons, mean over layers",
        "fraction",
        of=lambda line, recipe: mean(line["sparsity"]["dead_fraction"]),
        wandb="sparsity/dead_fraction",
        progress="dead {:.1%}",
        section="sparsity",
        from_zero=True,
    ),
    Metric(
        "tokens_per_second",
        "Throughput, all ranks",
        "tokens per second",
        progress=lambda value: f"{_si(value)} tok/s",
        section="speed",
        from_zero=True,
    ),
    Metric(
        "mfu",
        "FLOPs executed, over the bf16 peak",
        "fraction of the GPUs' bf16 peak, with any runtime.precision",
        progress="mfu {:5.1%}",
        section="speed",
        from_zero=True,
    ),
    Metric(
        "step_ms",
        "Time of a step",
        "ms",
        of=lambda line, recipe: 1e3 * recipe.train.global_batch_tokens / line["tokens_per_second"],
        section="kernels",
        from_zero=True,
    ),
    Metric(
        "mfu_dense",
        "FLOPs of the dense model, over the bf16 peak",
        "fraction of the GPUs' bf16 peak, as if every neuron were computed",
    ),
    Metric(
        "memory_gib",
        "Peak memory of rank 0",
        "GiB",
        progress="mem {:.1f} GiB",
        section="speed",
        from_zero=True,
    ),
    Metric(
        "micro_batch_size",
        "Sequences that a rank runs at once",
        "sequences",
        section="speed",
        from_zero=True,
    ),
    Metric("seconds", "Wall time since the process began", "s"),
    Metric("train_seconds", "Of training steps since the process began, without compilation", "s"),
    Metric("compile_seconds", "Of compilation since the process began", "s"),
    Metric(
        "sparse_layers",
        "Layers on the sparse kernels",
        "layers",
        of=lambda line, recipe: sum(line["kernels"]["sparse"]),
        wandb="kernels/sparse_layers",
        section="kernels",
        from_zero=True,
    ),
    Metric(
        "overflows",
        "Patterns computed again in the backward pass",
        "per step",
        of=lambda line, recipe: line["kernels"]["overflows"],
        wandb="kernels/overflows",
        section="kernels",
        from_zero=True,
    ),
    Metric(
        "union_mean",
        "Union of 64 tokens, mean over layers",
        "neurons that any of 64 tokens fires",
        of=lambda line, recipe: mean(line["kernels"]["union_mean"]),
        wandb="kernels/union_mean",
        section="kernels",
        scale="log",
    ),
)

LAYER_METRICS = (
    LayerMetric(
        "l1_coefficient",
        "L1 coefficient λ by layer",
        lambda line: line["l1_by_layer"],
        section="sparsity",
        unit="λ on the sum over hidden units",
        floor=1e-8,
        if_different=True,
    ),
    LayerMetric(
        "nnz_mean",
        "Active neurons by layer",
        lambda line: line["sparsity"]["nnz_mean"],
        histogram="sparsity/nnz_by_layer",
        section="sparsity",
        unit="neurons per token",
    ),
    LayerMetric("nnz_p99", "99th percentile", lambda line: line["sparsity"]["nnz_p99"]),
    LayerMetric("nnz_max", "Most active token", lambda line: line["sparsity"]["nnz_max"]),
    LayerMetric(
        "dead_fraction",
        "Dead neurons by layer",
        lambda line: line["sparsity"]["dead_fraction"],
        histogram="sparsity/dead_fraction_by_layer",
        section="sparsity",
        unit="fraction",
        scale="linear",
        floor=1e-4,
    ),
    LayerMetric(
        "sparse_kernels",
        "Kernels by layer",
        lambda line: [float(sparse) for sparse in line["kernels"]["sparse"]],
        section="kernels",
        unit="1 sparse, 0 dense",
        scale="linear",
    ),
    LayerMetric(
        "union_mean",
        "Union of 64 tokens by layer",
        lambda line: line["kernels"]["union_mean"],
        section="kernels",
        unit="neurons that any of 64 tokens fires",
    ),
)
