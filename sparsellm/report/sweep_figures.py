"""A sweep's figures, drawn by matplotlib: those of the paper that a sweep can make."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsellm.report.sweep_runs import SweepData, last_nnz
from sparsellm.runs.records import position_bucket_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Share of the neurons that fire, cross-entropy over dense ReLU's: paper, 1.5B (FACTS: table of λ).
PAPER_LOSS = {"paper, λ 2e-5": (29 / 5632, 2.297 / 2.255), "paper, dense ReLU": (911 / 5632, 1.0)}
PAPER_LOSS["paper, SiLU"] = (1.0, 2.240 / 2.255)
_MARKERS = "osD^vP*Xp<>h"


def quality(sweep: SweepData) -> Figure | None:
    """Held-out loss, mean task score and speed against non-zeros."""
    scored = any(g.scores for g in sweep.groups)
    forward = any(g.measured("model_forward", "tokens_per_ms") for g in sweep.groups)
    figure, axes = _figure(2 + scored + forward)
    for index, g in enumerate(sweep.groups):
        style = {"color": _color(index), "marker": _MARKERS[index % len(_MARKERS)]}
        nnz = [last_nnz(run) for run in g.runs if run.validation]
        axes[0].plot(nnz, g.losses, linestyle="none", label=g.name, **style)
        axes[1].plot(g.nnz, g.tokens_per_second / 1e3, linestyle="none", **style)
        ratios = [r["ratio"] for r in g.measured("model_forward", "tokens_per_ms")]
        if ratios:
            axes[2].plot([g.nnz] * len(ratios), ratios, linestyle="none", **style)
        if g.scores:
            axes[-1].plot([g.nnz] * len(g.scores), g.scores, linestyle="none", **style)
    _label(axes[0], "Held-out loss", "non-zeros a token, mean over layers", "nats a token")
    if sweep.dense_relu:
        axes[0].axhline(sweep.dense_relu, linestyle=":", color="gray")
        axes[0].axhline(sweep.dense_relu * 1.01, linestyle=":", color="silver")
        axes[0].set_title("Held-out loss (dotted: dense ReLU, and 1% above)")
    axes[0].legend(fontsize=8)
    _label(axes[1], "Training", axes[0].get_xlabel(), "thousand tokens a second")
    axes[1].set_ylim(bottom=0)
    if forward:
        _label(axes[2], "Forward of the model", axes[0].get_xlabel(), "× dense")
    if scored:
        _label(axes[-1], "Mean task score", axes[0].get_xlabel(), "share right")
    for axis in axes:
        _log(axis.xaxis, axis.set_xscale)
    return figure


def paper(sweep: SweepData) -> Figure | None:
    """Loss over dense ReLU's against the share of neurons that fire, beside the paper's."""
    if not sweep.dense_relu:
        return None
    figure, [axis] = _figure(1)
    for index, g in enumerate(sweep.groups):
        share = g.nnz / g.recipe.model.intermediate_size
        ratios = [loss / sweep.dense_relu for loss in g.losses]
        axis.plot(
            [share] * len(ratios), ratios, "o", color=_color(index), label=g.name, linestyle="none"
        )
    for marker, (name, (share, ratio)) in zip("*X+", PAPER_LOSS.items(), strict=True):
        axis.plot(share, ratio, marker, color="black", label=name, linestyle="none")
    axis.set_xscale("log")
    axis.legend(fontsize=8)
    _label(axis, "Loss against sparsity", "share of the neurons that fire", "loss over dense ReLU")
    return figure


def training(sweep: SweepData) -> Figure | None:
    """Non-zeros, dead neurons and held-out loss over training; λ where it moves."""
    figure, axes = _figure(4)
    for index, g in enumerate(sweep.groups):
        for number, run in enumerate(g.runs):
            style = {"color": _color(index), "label": None if number else g.name, "linewidth": 1}
            tokens = [r["tokens"] for r in run.train]

            def stat(key: str, run: Any = run) -> list[float]:
                return [statistics.fmean(r["sparsity"][key]) for r in run.train]

            axes[0].plot(tokens, stat("nnz_mean"), **style)
            axes[1].plot(tokens, [100 * v for v in stat("dead_fraction")], **style)
            points = [(r["tokens"], r["loss"]) for r in run.validation]
            if points:
                axes[2].plot(*zip(*points, strict=True), marker=".", **style)
            if g.recipe.sparsity.target_nnz:
                axes[3].plot(tokens, [r["l1_coefficient"] for r in run.train], **style)
    x = "training tokens"
    _label(axes[0], "Non-zeros a token, mean over layers", x, "")
    _log(axes[0].yaxis, axes[0].set_yscale)
    _label(axes[1], "Dead neurons", x, "%")
    _label(axes[2], "Held-out loss", x, "nats a token")
    _label(axes[3], "λ under a target", x, "")
    axes[3].set_yscale("log")
    axes[0].legend(fontsize=7)
    return figure


def places(sweep: SweepData) -> Figure | None:
    """Non-zeros by layer and by position at the last record."""
    figure, axes = _figure(2)
    for index, g in enumerate(sweep.groups):
        stats, style = g.runs[0].train[-1]["sparsity"], {"color": _color(index), "marker": "."}
        layers = stats["nnz_mean"]
        axes[0].plot(range(len(layers)), layers, label=g.name, **style)
        starts = position_bucket_starts(g.recipe.model.context_length)
        by_position = [statistics.fmean(v) for v in zip(*stats["nnz_by_position"], strict=True)]
        axes[1].plot([start + 1 for start in starts], by_position, **style)
    _label(axes[0], "Non-zeros by layer", "layer", "non-zeros a token")
    _label(axes[1], "Non-zeros by position", "position in the sequence, from 1", "")
    axes[1].set_xscale("log")
    for axis in axes:
        _log(axis.yaxis, axis.set_yscale)
    axes[0].legend(fontsize=7)
    return figure


def coefficients(sweep: SweepData) -> Figure | None:
    """Non-zeros, held-out loss and training speed against λ, where λ stands still."""
    fixed = [
        g
        for g in sweep.groups
        if g.recipe.activation.exact_zeros and not g.recipe.sparsity.target_nnz and g.losses
    ]
    if len({g.l1_coefficient for g in fixed}) < 2:
        return None
    figure, axes = _figure(3)
    for g in fixed:
        color = _color(sweep.groups.index(g))
        places = [g.l1_coefficient] * len(g.runs)
        axes[0].plot(places, [last_nnz(run) for run in g.runs], "o", color=color, label=g.name)
        axes[1].plot(places[: len(g.losses)], g.losses, "o", color=color)
        axes[2].plot(g.l1_coefficient, g.tokens_per_second / 1e3, "o", color=color)
    least = min(g.l1_coefficient for g in fixed if g.l1_coefficient)
    for axis in axes:
        axis.set_xscale("symlog", linthresh=least)
    axes[0].set_yscale("log")
    _label(axes[0], "Non-zeros a token", "λ", "")
    _label(axes[1], "Held-out loss", "λ", "nats a token")
    _label(axes[2], "Training", "λ", "thousand tokens a second")
    axes[2].set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    return figure


def speed(sweep: SweepData) -> Figure | None:
    """A layer's non-zeros against its speed-up, and the model's speed and energy against λ."""
    layers = [
        (r["case"]["measured_nnz"], r["ratio"])
        for g in sweep.groups
        for r in g.measured("layer_forward", "ms")
    ]
    if not layers:
        return None
    figure, axes = _figure(3)
    x, y = zip(*layers, strict=True)
    axes[0].plot(x, y, ".")
    title = "A layer's FFN forward"
    if len(set(x)) > 1 and len(set(y)) > 1:
        title += f", correlation {statistics.correlation(x, y):.3f} (paper −0.996)"
    _label(axes[0], title, "non-zeros a token", "× dense")
    for axis, metric in ((axes[1], "tokens_per_ms"), (axes[2], "mJ_per_token")):
        points = [
            (g.l1_coefficient, r["ratio"])
            for g in sweep.groups
            for r in g.measured("model_forward", metric)
        ]
        if points:
            axis.plot(*zip(*sorted(points), strict=True), "o")
        axis.set_xscale("symlog", linthresh=1e-5)
    _label(axes[1], "Forward of the model: speed", "λ", "× dense")
    _label(axes[2], "Forward of the model: energy", "λ", "dense over sparse")
    return figure


FIGURES: dict[str, Callable[[SweepData], Any]] = {
    "quality_and_speed": quality,
    "against_lambda": coefficients,
    "against_the_paper": paper,
    "training": training,
    "layers_and_positions": places,
    "speed_and_energy": speed,
}


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    # The object interface: no pyplot state, no display, no backend to choose.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4.5), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _label(axis: Axes, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if "tokens" in x:
        axis.xaxis.set_major_formatter(EngFormatter())
    if x == "layer":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, alpha=0.25)


def _log(axis: Any, set_scale: Callable[[str], None]) -> None:
    """A log scale whose numbers are written out."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(StrMethodFormatter(""))


def _color(index: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab10"](index % 10)
