"""The figures of benchmarks/figures/ that show a sweep: what zeros cost, and what they bring."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import sweep_results
from results import Drawn, Line
from sparsellm.report import drawing
from sweep_results import SweepGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NNZ = "non-zeros per token"
_L1 = "L1, λ at each point"  # the runs with a constant λ
# Groups of runs in words; others keep their name.
_WORDS = {
    "dense-relu": "dense ReLU",
    "dense-silu": "dense SiLU",
    "target-30": "target of 30",
    "target-30-dense-kernels": "target of 30, dense kernels",
    "dense-phase": "30, dense at first",
    "l1-warmup": "L1 warm-up",
    "non-gated": "30, non-gated",
    "per-layer": "30 in each layer",
    "reinit": "30, re-initialised",
}
_SERIES = {_L1: 0, "dense-relu": 1, "dense-silu": 2, "target-30": 3}  # numbers of their styles


def quality_and_speed(lines: Sequence[Line]) -> Drawn | None:
    """Held-out loss and training rate against non-zeros, of the size that has the most runs."""
    groups = [g for g in sweep_results.sweep_groups(lines) if g.nnz and g.losses]
    groups = [g for g in groups if not g.is_of_frontier]
    sizes = Counter(g.size for g in groups)
    if not sizes:
        return None
    [(size, _)] = sizes.most_common(1)
    dense = sweep_results.dense_relu_losses(groups).get(size)
    groups = [g for g in groups if g.size == size]
    figure, (loss, rate) = drawing.new_figure(2, size=(9, 4.2))  # legible in a README
    _by_nnz(loss, groups, lambda g: _each_seed(g, g.losses))
    # Without texts: the points have the same x as on the left, and their texts would overlap.
    _by_nnz(rate, groups, lambda g: _each_seed(g, [r / 1e3 for r in g.rates]), texts=False)
    if dense:
        drawing.dense_lines(loss, dense)
    layers, width, tokens = size
    of = f"{layers} layers of {width}, {tokens / 1e6:,.0f}M tokens"
    loss.set(title=f"Held-out loss: {of}", xlabel=_NNZ, ylabel="nats per token")
    rate.set(title="Training", xlabel=_NNZ, ylabel="thousand tokens/s")
    drawing.from_zero(rate)
    for axes in (loss, rate):
        drawing.log_scale(axes.xaxis)
    drawing.legend_beside(figure, [loss, rate])
    return figure, [line for g in groups for line in g.lines]


def score_and_forward(lines: Sequence[Line]) -> Drawn | None:
    """Of the sweep with the most scores: those, and what `bench forward` measured of its runs."""
    scored = [g for g in sweep_results.sweep_groups(lines) if g.nnz and g.scores]
    scored = [g for g in scored if not g.is_of_frontier]
    sweeps = Counter(g.sweep for g in scored)
    if not sweeps:
        return None
    [(sweep, _)] = sweeps.most_common(1)
    groups = [g for g in scored if g.sweep == sweep]
    figure, panels = drawing.new_figure(2, rows=2, size=(10, 8))
    score, speed, energy, layers = panels
    shown: list[Line] = [line for g in groups for line in g.lines]
    _by_nnz(score, groups, lambda g: _each_seed(g, [100 * s for s in g.scores]))
    score.set(title=f"Mean task score (sweep {sweep})", xlabel=_NNZ, ylabel="% right")
    for axes, title, unit, metric, draw in (
        (speed, "Model forward, token order: speed", "× dense", "tokens_per_ms", _by_nnz),
        (energy, "The same: energy", "dense over sparse", "mJ_per_token", _by_nnz),
        (layers, "FFN of each layer alone, text order: speed", "× dense", "ms", _markers),
    ):
        measured = {g.name: sweep_results.forwards(lines, g, metric) for g in groups}
        shown += [line for own in measured.values() for line in own]
        draw(axes, groups, partial(_ratios, measured))
        axes.set(title=title, xlabel=_NNZ, ylabel=unit)
    for axes in panels:
        drawing.log_scale(axes.xaxis)
    drawing.legend_beside(figure, panels)
    return figure, shown


def _each_seed(group: SweepGroup, values: Sequence[float]) -> list[drawing.Point]:
    """Non-zeros and value of every seed that has both."""
    return list(zip(group.nnz, values, strict=False))


def _ratios(measured: dict[str, list[Line]], group: SweepGroup) -> list[drawing.Point]:
    """Non-zeros on the text of the measurement, and speed or energy over dense."""
    return [(line["case"]["measured_nnz"], line["ratio"]) for line in measured[group.name]]


def _markers(
    axes: Axes, groups: Sequence[SweepGroup], points: Callable[[SweepGroup], list[drawing.Point]]
) -> None:
    """Markers without lines: for several points of a run."""
    for index, name, own in _series(groups):
        if together := [point for g in own for point in points(g)]:
            axes.plot(*zip(*together, strict=True), label=name, **drawing.points_style(index))


def _by_nnz(
    axes: Axes,
    groups: Sequence[SweepGroup],
    points: Callable[[SweepGroup], list[drawing.Point]],
    *,
    texts: bool = True,
) -> None:
    """Markers of every seed; runs that differ in λ alone are one curve, with λ at its points."""
    for index, name, own in _series(groups):
        written = texts and name == _L1
        names = [drawing.exponent(g.case["l1_coefficient"]) if written else "" for g in own]
        drawing.series(axes, name, list(zip(names, map(points, own), strict=True)), index)


def _series(groups: Sequence[SweepGroup]) -> Iterator[tuple[int, str, list[SweepGroup]]]:
    """Number of the style, name in the legend, and groups: a constant λ makes no other series."""
    found: dict[str, list[SweepGroup]] = defaultdict(list)
    for g in groups:
        found[_L1 if re.fullmatch(r"l1-[\d.e-]+", g.name) else g.name].append(g)
    for place, (name, own) in enumerate(found.items()):
        yield _SERIES.get(name, len(_SERIES) + place), _WORDS.get(name, name), own
