"""The metrics of a training step: one entry each, from which everything that shows it follows.

A metric is a number that the device counts (`Counter`), one that `training.step.train_step` or
`training.meter.Meter` puts under its name into the step's values, or one that is derived from a
record. Its entry makes it part of metrics.jsonl, wandb, the progress line, the report's charts and
the documentation's table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sparsellm.recipe import Recipe

Scale = Literal["linear", "log"]
Section = Literal["training", "sparsity", "speed", "kernels"]
Line = dict[str, Any]  # of metrics.jsonl, of kind `train`
Reduction = Literal["sum", "per_token", "per_token_and_layer"]


class Counter(NamedTuple):
    """Counts on the device; its sum over all micro-batches and ranks is read once per step.

    Args:
        of: the number of a micro-batch, from its `training.objective.LossSums`: a tensor () of a
            `Metric`, (L,) of a `LayerMetric`. It must not wait for the device.
        reduction: what the sum is divided by: nothing, the tokens of the step, or tokens times
            layers.
    """

    of: Callable[[Any], Any]
    reduction: Reduction = "sum"


@dataclass(frozen=True)
class Metric:
    """One number per step.

    Args:
        name: its key in metrics.jsonl.
        title: heading where it is drawn.
        unit: unit of its values.
        section: section of the report that draws it over the training tokens; "": not drawn.
        progress: how the progress line shows a value, such as ``loss {:.4f}``; "": not shown.
        of: derives it from a line and the recipe; None: the line has it under ``name``.
        wandb: section of wandb that it is in.
        scale: scale of its axis.
        from_zero: the axis begins at zero.
        counter: counts it on the device; None: the host knows it.
    """

    name: str
    title: str
    unit: str
    section: Section | Literal[""] = ""
    progress: str | Callable[[float], str] = ""
    of: Callable[[Line, Recipe], float | None] | None = None
    wandb: str = "train"
    scale: Scale = "linear"
    from_zero: bool = False
    counter: Counter | None = None

    def value(self, line: Line, recipe: Recipe) -> float | None:
        """Its value in a line; None if the line is older than this metric."""
        try:
            number = line[self.name] if self.of is None else self.of(line, recipe)
        except (KeyError, TypeError):  # the line lacks it, or what it derives from
            return None
        return None if number is None or math.isnan(number) else float(number)

    def text(self, value: float) -> str:
        """Its part of the progress line."""
        return self.progress(value) if callable(self.progress) else self.progress.format(value)


@dataclass(frozen=True)
class LayerMetric:
    """One number per layer and step, in wandb as ``layers/<name>/<layer>``.

    Args:
        name: its name there.
        title: heading where it is drawn.
        of: the values of a line, one per layer; None: the line has them under ``layers``.
        section: of the report, which draws it as a heatmap over layers and training tokens.
        unit: of its values, in the heatmap.
        scale: of the heatmap's colours.
        floor: the lowest value that a logarithmic scale tells from zero.
        if_different: the report draws it only where the layers of some record differ.
        counter: counts them on the device; None: the record has them for other reasons.
    """

    name: str
    title: str
    of: Callable[[Line], list[float]] | None = None
    section: Section | Literal[""] = ""
    unit: str = ""
    scale: Scale = "log"
    floor: float = 0.1
    if_different: bool = False
    counter: Counter | None = None

    def values(self, line: Line) -> list[float]:
        """Its values in a line, one per layer; none if the line is older than this metric."""
        try:
            return line["layers"][self.name] if self.of is None else self.of(line)
        except KeyError:
            return []


def against_target(error: float) -> str:
    """Non-zeros against their target in words; ``error`` is relative, 0 on the target."""
    if error >= 1:  # percentages in thousands say little, as in the first steps
        return f"{1 + error:.3g}× target"
    return f"{abs(error):.1%} {'below' if error < 0 else 'above'} target"


def mean(values: list[float]) -> float:
    """The arithmetic mean; NaN of an empty list, as in a line older than the statistic."""
    return sum(values) / len(values) if values else math.nan


def _of(part: str, key: str) -> Callable[[Line], list[float]]:
    return lambda line: line[part][key]  # type: ignore[no-any-return]


def _mean_of(part: str, key: str) -> Callable[[Line, Recipe], float]:
    return lambda line, recipe: mean(line[part][key])


def short(value: float, space: str = "") -> str:
    """Three digits with a prefix of the SI, such as 12.3k."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{space}{prefix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 26:03:59."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


# A script of your own may append to these lists before it trains.
# fmt: off
METRICS = [
    Metric("loss", "Cross-entropy", "nats per token", "training", "loss {:.4f}",
           counter=Counter(lambda sums: sums.cross_entropy_sum, "per_token")),
    Metric("l1", "L1 of the activations", "Σ|h|, mean over tokens and layers", "training",
           "l1 {:.3g}", of=lambda line, _: line["l1"] or None, scale="log",  # 0: not computed
           counter=Counter(lambda sums: sums.l1_sum_L.sum(), "per_token_and_layer")),
    Metric("l1_coefficient", "L1 coefficient λ", "λ on the sum over neurons", "training",
           from_zero=True),
    Metric("learning_rate", "Learning rate", "learning rate", "training", from_zero=True),
    Metric("grad_norm", "Gradient norm", "global norm before clipping", "training", scale="log"),
    Metric("skipped_steps", "Steps skipped so far", "steps", "training",
           lambda value: f"{value:.0f} skipped" if value else "", from_zero=True),
    Metric("epoch", "Passes over the text that repeats most", "passes", "", "epoch {:.2f}",
           lambda line, _: 1 + max(line["epochs"].values())),
    Metric("nnz", "Active neurons, mean over layers", "neurons per token", "sparsity", "nnz {:.1f}",
           _mean_of("sparsity", "nnz_mean"), "sparsity", scale="log", from_zero=True),
    Metric("nnz_fraction", "Active neurons, share of the width", "fraction", "", "({:.2%})",
           lambda line, r: mean(line["sparsity"]["nnz_mean"]) / r.model.intermediate_size,
           "sparsity"),
    Metric("target_error", "Active neurons against the target",
           "ratio to the target of the step, minus 1", "sparsity", against_target),
    Metric("dead_fraction", "Dead neurons, mean over layers", "fraction", "sparsity", "dead {:.1%}",
           _mean_of("sparsity", "dead_fraction"), "sparsity", from_zero=True),
    Metric("tokens_per_second", "Throughput, all ranks", "tokens per second", "speed",
           lambda value: f"{short(value)} tok/s", from_zero=True),
    Metric("mfu", "FLOPs executed, over the bf16 peak",
           "fraction of the GPUs' bf16 peak, also with FP8", "speed", "mfu {:5.1%}",
           from_zero=True),
    Metric("step_ms", "Time of a step", "ms", "kernels", from_zero=True,
           of=lambda line, r: (  # older lines lack it
               line.get("step_ms")
               or 1e3 * r.train.global_batch_tokens / line["tokens_per_second"])),
    Metric("mfu_dense", "FLOPs of the dense model, over the bf16 peak",
           "fraction of the GPUs' bf16 peak, as if every neuron were computed"),
    Metric("memory_gib", "Peak memory of rank 0", "GiB", "speed", "mem {:.1f} GiB", from_zero=True),
    Metric("micro_batch_size", "Sequences that a rank runs at once", "sequences", "speed",
           from_zero=True),
    Metric("seconds", "Wall time since the process began", "s"),
    Metric("train_seconds", "Time in training steps since the process began, no compilation", "s"),
    Metric("compile_seconds", "Time in compilation since the process began", "s"),
    Metric("sparse_layers", "Layers on the sparse kernels", "layers", "kernels", from_zero=True,
           of=lambda line, r: sum(line["kernels"]["sparse"]), wandb="kernels"),
    Metric("overflows", "Patterns recomputed in the backward pass", "per step", "kernels",
           of=lambda line, r: line["kernels"]["overflows"], wandb="kernels", from_zero=True),
    Metric("union_mean", "Active set (union) of 64 tokens, mean over layers",
           "neurons active for any of 64 tokens", "kernels",
           of=_mean_of("kernels", "union_mean"), wandb="kernels", scale="log"),
]

LAYER_METRICS = [
    LayerMetric("l1_coefficient", "L1 coefficient λ by layer", lambda line: line["l1_by_layer"],
                "sparsity", "λ on the sum over neurons", floor=1e-8, if_different=True),
    LayerMetric("nnz_mean", "Active neurons by layer", _of("sparsity", "nnz_mean"), "sparsity",
                "neurons per token"),
    LayerMetric("nnz_p99", "99th percentile", _of("sparsity", "nnz_p99")),
    LayerMetric("nnz_max", "Most active token", _of("sparsity", "nnz_max")),
    LayerMetric("dead_fraction", "Dead neurons by layer", _of("sparsity", "dead_fraction"),
                "sparsity", "fraction", "linear", floor=1e-4),
    LayerMetric("sparse_kernels", "Kernels by layer",
                lambda line: [float(sparse) for sparse in line["kernels"]["sparse"]],
                "kernels", "1 sparse, 0 dense", "linear"),
    LayerMetric("union_mean", "Active set (union) of 64 tokens by layer",
                _of("kernels", "union_mean"), "kernels", "neurons active for any of 64 tokens"),
]
# fmt: on
