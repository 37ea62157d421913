"""Panels of a sweep's figures: markers of its groups against non-zeros, λ, target and size.

A panel draws on the given axes; if its data is missing, it returns a sentence that says so.
Groups keep their colour and marker in all panels.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparsellm.estimate import count_parameters
from sparsellm.report import drawing
from sparsellm.report.published import (
    PAPER_CORRELATION,
    PAPER_DENSE,
    PAPER_MODELS,
    PAPER_RUNS,
    PAPER_WIDTH,
)
from sparsellm.report.sweep_runs import Group, SweepData, last_nnz, mean_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = Callable[[SweepData, "Axes"], str | None]  # the reason, if nothing was drawn
Points = Callable[[Group], Sequence[tuple[float, float]]]

_NNZ = "non-zeros per token, mean over layers"
_SHARE = "share of the neurons that fire"
_NO_VALIDATION = "no run has a held-out loss (validation.every_steps)"
_NO_SCORES = "no run has a mean task score (evaluation.every_steps, or `sparsellm eval RUN`)"
_NO_FORWARD = "no forward was measured (`sparsellm bench forward RUN… --record DIR/bench.jsonl`)"
_NO_LAYERS = _NO_FORWARD.replace("--record", "--layers --record")


# Markers of the paper's 1.5B runs and of its model sizes.
_RUNS, _SIZES = "*X+x", "1234"


def against(
    title: str,
    x: str,
    y: str,
    points: Points,
    missing: str,
    *,
    log_x: bool = True,
    from_zero: bool = False,
    name_l1: bool = True,
    further: Callable[[SweepData, Axes], None] | None = None,
) -> Panel:
    """A panel of one marker per group and seed; groups that differ in λ alone are one curve.

    ``name_l1`` writes λ at its points; ``further`` adds what they are compared with.
    """

    def draw(sweep: SweepData, axes: Axes) -> str | None:
        families = sweep.families()
        if not any(points(g) for _, own in families for g in own):
            return f"{title}: {missing}."
        for index, own in families:
            several = name_l1 and len(own) > 1
            texts = [drawing.exponent(g.l1_coefficient) if several else "" for g in own]
            name = own[0].name
            if len(own) > 1:
                name = re.sub(r"-[\d.]+(e-?\d+)?$", "", name)  # the value that `each` appended
                name += ", λ at each point" if name_l1 else ""
            members = [(text, points(g)) for text, g in zip(texts, own, strict=True)]
            drawing.series(axes, name, members, index)
        if further:
            further(sweep, axes)
        drawing.label(axes, title, x, y)
        if log_x:
            drawing.log_scale(axes.xaxis)
        if from_zero:
            drawing.from_zero(axes)
        return None

    return draw


def _reference(axes: Axes, points: Sequence[tuple[str, float, float]], markers: str) -> None:
    """The paper's points, in the colour of text."""
    for marker, (name, x, y) in zip(markers, points, strict=False):
        axes.plot(x, y, marker, color=drawing.TEXT, label=f"paper, {name}", markersize=9)


# --- against non-zeros ----------------------------------------------------------------------------


def losses(g: Group) -> list[tuple[float, float]]:
    """Non-zeros and held-out loss of each seed."""
    return [(last_nnz(run), run.validation[-1]["loss"]) for run in g.runs if run.validation]


def scores(g: Group) -> list[tuple[float, float]]:
    """Non-zeros and mean task score of each seed, %."""
    found = [(last_nnz(run), mean_score(run)) for run in g.runs]
    return [(nnz, 100 * score) for nnz, score in found if score is not None]


def rates(g: Group) -> list[tuple[float, float]]:
    """Non-zeros and training rate, thousand tokens/s."""
    return [(g.nnz, g.tokens_per_second / 1e3)]


def forwards(g: Group) -> list[tuple[float, float]]:
    """Non-zeros and the forward's speed over dense."""
    return [(g.nnz, r["ratio"]) for r in g.measured("model_forward", "tokens_per_ms")]


def _dense_lines(sweep: SweepData, axes: Axes) -> None:
    if sweep.dense_relu:
        drawing.dense_lines(axes, sweep.dense_relu)


loss_by_nnz = against("Held-out loss", _NNZ, "nats per token", losses, _NO_VALIDATION,
                      further=_dense_lines)  # fmt: skip
score_by_nnz = against("Mean task score", _NNZ, "% right", scores, _NO_SCORES)
rate_by_nnz = against("Training", _NNZ, "thousand tokens/s", rates, "", from_zero=True)
forward_by_nnz = against("Forward of the model", _NNZ, "× dense", forwards, _NO_FORWARD)

# --- beside the paper -----------------------------------------------------------------------------


def loss_beside_paper(sweep: SweepData, axes: Axes) -> str | None:
    """Loss over dense ReLU's against the share of neurons that fire."""
    dense = sweep.dense_relu
    if not dense:
        return "Loss beside the paper's: no run is dense ReLU with λ 0, to which losses compare."

    def ratios(g: Group) -> list[tuple[float, float]]:
        return [(g.nnz / g.recipe.model.intermediate_size, loss / dense) for loss in g.losses]

    def beside(sweep: SweepData, axes: Axes) -> None:
        points = [(r.name, r.nnz / PAPER_WIDTH, r.loss / PAPER_DENSE.loss) for r in PAPER_RUNS]
        _reference(axes, points, _RUNS)

    title = "Loss over that of dense ReLU"
    return against(title, _SHARE, "ratio", ratios, _NO_VALIDATION, further=beside)(sweep, axes)


def _score_beside(sweep: SweepData, axes: Axes) -> None:
    _reference(axes, [(r.name, r.nnz / PAPER_WIDTH, r.accuracy) for r in PAPER_RUNS], _RUNS)


def _forward_beside(sweep: SweepData, axes: Axes) -> None:
    sizes = [(m.name, m.nnz / PAPER_WIDTH, m.forward.ratio) for m in PAPER_MODELS if m.nnz]
    _reference(axes, sizes, _SIZES)


def _by_share(points: Points) -> Points:
    return lambda g: [(x / g.recipe.model.intermediate_size, y) for x, y in points(g)]


score_beside_paper = against("Mean task score", _SHARE, "% right", _by_share(scores), _NO_SCORES,
                             further=_score_beside)  # fmt: skip
forward_beside_paper = against("Forward of the model", _SHARE, "× dense", _by_share(forwards),
                               _NO_FORWARD, further=_forward_beside)  # fmt: skip

# --- against a setting: λ, target, size -----------------------------------------------------------


def _setting(g: Group, name: str) -> float | None:
    """Of the axis ``name``; None where the group has no place on it."""
    if name == "λ":
        return g.l1_coefficient if g.has_constant_l1 else None
    if name == "target":
        return g.recipe.sparsity.target_nnz
    return count_parameters(g.recipe).total / 1e6


_AXES = {
    "λ": "λ",
    "target": "sparsity.target_nnz, non-zeros per token",
    "size": "parameters, millions",
}


def by_setting(
    name: str, title: str, y: str, points: Points, missing: str, **options: Any
) -> Panel:
    """A panel against λ (where it stands still), the target or the size, if two or more differ."""

    def moved(g: Group) -> list[tuple[float, float]]:
        place = _setting(g, name)
        return [] if place is None else [(place, value) for _, value in points(g)]

    def draw(sweep: SweepData, axes: Axes) -> str | None:
        places = {_setting(g, name) for g in sweep.groups} - {None}
        if len(places) < 2:
            what = {"λ": "values of a constant λ", "target": "targets", "size": "sizes"}[name]
            return f"Not drawn: the runs have fewer than two different {what}."
        panel = against(title, _AXES[name], y, moved, missing, log_x=False, name_l1=name != "λ",
                        **options)  # fmt: skip
        reason = panel(sweep, axes)
        positive = [place for place in places if place]
        if reason is None and positive:
            drawing.log_scale(axes.xaxis, linear_below=min(positive) if 0 in places else None)
        return reason

    return draw


def nnz_of(g: Group) -> list[tuple[float, float]]:
    """Non-zeros of each seed, twice."""
    return [(last_nnz(run), last_nnz(run)) for run in g.runs]


def energies(g: Group) -> list[tuple[float, float]]:
    """Non-zeros and dense energy over ours."""
    return [(g.nnz, r["ratio"]) for r in g.measured("model_forward", "mJ_per_token")]


def _diagonal(sweep: SweepData, axes: Axes) -> None:
    targets = sorted({t for g in sweep.groups if (t := g.recipe.sparsity.target_nnz)})
    axes.plot(targets, targets, linestyle=":", color=drawing.MUTED, label="the target")


def _paper_sizes(sweep: SweepData, axes: Axes) -> None:
    _reference(
        axes, [(m.name, 1e3 * float(m.name[:-1]), m.nnz) for m in PAPER_MODELS if m.nnz], _SIZES
    )


def panels_by(name: str) -> list[Panel]:
    """All panels against one setting."""
    beside = {"target": _diagonal, "size": _paper_sizes}.get(name)
    found = [
        by_setting(name, "Non-zeros per token", "", nnz_of, "", further=beside),
        by_setting(name, "Held-out loss", "nats per token", losses, _NO_VALIDATION),
        by_setting(name, "Training", "thousand tokens/s", rates, "", from_zero=True),
        by_setting(name, "Forward of the model: speed", "× dense", forwards, _NO_FORWARD),
    ]
    if name == "λ":
        title = "Forward of the model: energy"
        found.append(by_setting(name, title, "dense over sparse", energies, _NO_FORWARD))
    return found


# --- layers ---------------------------------------------------------------------------------------


def layer_speed(sweep: SweepData, axes: Axes) -> str | None:
    """A layer's non-zeros against its measured speed-up, with the correlation."""
    title = "FFN of a layer, forward"
    points = {i: _layer_points(g) for i, g in enumerate(sweep.groups)}
    together = [point for values in points.values() for point in values]
    if not together:
        return f"A layer's non-zeros against its speed-up: {_NO_LAYERS}."
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
