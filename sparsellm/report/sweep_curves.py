"""Panels of a sweep's figures with a curve per run: over training, by layer, by position, by token.

`sweep_panels` says what a panel is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sparsellm.report import drawing
from sparsellm.report.published import PAPER_CORRELATION, PAPER_DEAD
from sparsellm.report.sweep_panels import NNZ, NO_LAYERS, NO_VALIDATION, Panel
from sparsellm.report.sweep_runs import Group, SweepData, last_nnz
from sparsellm.runs.records import position_bucket_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS_SHOWN = 12  # of each end


def over_training(title: str, y: str, curve: Callable[[Any], tuple[Any, Any]], missing: str = "",
                  *, log_above: float | None = None, further: Callable[[Axes], None] | None = None,
                  ) -> Panel:  # fmt: skip
    """A panel of one line per run; seeds share their group's colour.

    The axis is linear, or logarithmic above ``log_above``.
    """

    def draw(sweep: SweepData, axes: Axes) -> str | None:
        drawn = False
        for index, number, group, run in _numbered(sweep):
            x, values = curve(run)
            if x:
                drawn = True
                axes.plot(x, values, color=drawing.color(index), linewidth=1,
                          marker=drawing.marker(index) if len(x) < 40 else None, markersize=4,
                          label=None if number else group.name)  # fmt: skip
        if not drawn:
            return f"{title}: {missing}."
        if further:
            further(axes)
        drawing.label(axes, title, "training tokens", y)
        if log_above is not None:
            drawing.log_scale(axes.yaxis, linear_below=log_above or None)
        return None

    return draw


def _numbered(sweep: SweepData) -> Iterator[tuple[int, int, Group, Any]]:
    for index, group in enumerate(sweep.groups):
        for number, run in enumerate(group.runs):
            yield index, number, group, run


def _stat(key: str, scale: float = 1.0) -> Callable[[Any], tuple[Any, Any]]:
    def curve(run: Any) -> tuple[list[int], list[float]]:
        values = [scale * statistics.fmean(r["sparsity"][key]) for r in run.train]
        return [r["tokens"] for r in run.train], values

    return curve


def _held_out(run: Any) -> tuple[list[int], list[float]]:
    return [r["tokens"] for r in run.validation], [r["loss"] for r in run.validation]


def _moving_l1(run: Any) -> tuple[list[int], list[float]]:
    moved = run.train if run.recipe.sparsity.target_nnz else []
    return [r["tokens"] for r in moved], [r["l1_coefficient"] for r in moved]


def _paper_dead(axes: Axes) -> None:
    axes.axhline(100 * PAPER_DEAD, linestyle=":", color=drawing.MUTED, label="paper, λ 2e-5")


nnz_over_training = over_training("Non-zeros per token, mean over layers", "", _stat("nnz_mean"),
                                  log_above=0.1)  # fmt: skip
dead_over_training = over_training("Dead neurons", "%", _stat("dead_fraction", 100),
                                   further=_paper_dead)  # fmt: skip
loss_over_training = over_training("Held-out loss", "nats per token", _held_out, NO_VALIDATION)
l1_over_training = over_training("λ under a target", "", _moving_l1,
                                 "no run has sparsity.target_nnz", log_above=0)  # fmt: skip

# --- layers, positions, tokens --------------------------------------------------------------------


def by_layer(sweep: SweepData, axes: Axes) -> None:
    """Non-zeros of each layer at the last record, mean over seeds."""
    for index, g in enumerate(sweep.groups):
        layers = _mean_over_seeds(g, lambda stats: stats["nnz_mean"])
        style = drawing.points_style(index) | {"linestyle": "-", "markersize": 5}
        axes.plot(range(len(layers)), layers, label=g.name, **style)
    drawing.label(axes, "Non-zeros by layer", "layer", "non-zeros per token")
    drawing.log_scale(axes.yaxis, linear_below=0.1)


def by_position(sweep: SweepData, axes: Axes) -> None:
    """Non-zeros along a sequence at the last record, mean over layers and seeds."""
    for index, g in enumerate(sweep.groups):
        starts = position_bucket_starts(g.recipe.model.context_length)
        places = _mean_over_seeds(g, _over_layers)
        style = drawing.points_style(index) | {"linestyle": "-", "markersize": 5}
        axes.plot([start + 1 for start in starts], places, label=g.name, **style)
    drawing.label(axes, "Non-zeros by position", "position in the sequence, from 1", "")
    drawing.log_scale(axes.xaxis)
    drawing.log_scale(axes.yaxis, linear_below=0.1)


def _over_layers(stats: dict[str, Any]) -> list[float]:
    return [statistics.fmean(v) for v in zip(*stats["nnz_by_position"], strict=True)]


def _mean_over_seeds(g: Group, values: Callable[[dict[str, Any]], list[float]]) -> list[float]:
    each = [values(run.train[-1]["sparsity"]) for run in g.runs]
    return [statistics.fmean(v) for v in zip(*each, strict=True)]


def layer_speed(sweep: SweepData, axes: Axes) -> str | None:
    """A layer's non-zeros against its measured speed-up, with the correlation."""
    title = "FFN of a layer, forward"
    points = {i: _layer_points(g) for i, g in enumerate(sweep.groups)}
    together = [point for values in points.values() for point in values]
    if not together:
        return f"A layer's non-zeros against its speed-up: {NO_LAYERS}."
    for index, values in points.items():
        if values:
            name = sweep.groups[index].name
            axes.plot(*zip(*values, strict=True), label=name, **drawing.points_style(index))
    x, y = zip(*together, strict=True)
    if len(set(x)) > 1 and len(set(y)) > 1:
        found = statistics.correlation(x, y)
        title += f": correlation {found:.3f} (paper {PAPER_CORRELATION})".replace("-", "−")
    drawing.label(axes, title, "non-zeros per token", "× dense")
    return None


def _layer_points(g: Group) -> list[tuple[float, float]]:
    return [(r["case"]["measured_nnz"], r["ratio"]) for r in g.measured("layer_forward", "ms")]


def active_tokens(end: str) -> Panel:
    """The tokens with the fewest (``lowest``) or most (``highest``) non-zeros, of one run."""

    def draw(sweep: SweepData, axes: Axes) -> str | None:
        analysed = [run for *_, run in _numbered(sweep) if run.analysis is not None]
        word = {"lowest": "Least", "highest": "Most"}[end]
        if not analysed:
            return f"{word} active tokens: no run was analysed (`sparsellm analyze RUN`)."
        run = min(analysed, key=last_nnz)  # the sparsest
        found = run.analysis["tokens_by_nnz"][end][:_TOKENS_SHOWN]
        names = [ascii(token["text"]) for token in found]
        axes.barh(range(len(found)), [token["nnz_mean"] for token in found],
                  color=drawing.color(0))  # fmt: skip
        axes.set_yticks(range(len(found)), names)
        axes.invert_yaxis()
        drawing.label(axes, f"{word} active tokens, {run.label}", NNZ, "")
        return None

    return draw
