"""The figures of the sweeps `frontier…`: held-out loss against GPU time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import sweep_results
from results import Drawn, Line
from sparsellm.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOISE = 0.034  # nats; repeats of a run with one seed differ by up to this (docs/results.md)
_Named = tuple[str, str, list[float], list[float]]  # name, colour, x and y of a line


class _Curve(NamedTuple):
    """An arm of the sweep `frontier` at its best learning rate; means over its seeds."""

    seconds: list[float]  # GPU time until each validation
    losses: list[float]  # held out, at each
    ends: list[float]  # of each seed, at the last
    lines: list[Line]


def frontier(lines: Sequence[Line]) -> Drawn | None:
    """Loss against GPU time: a line for each kind of FFN, in FP8 where that was trained.

    The last mark of a line has the range of its seeds. A hollow one is bf16's end.
    """
    return _drawn(_frontier_curves(lines), list(_KINDS.values()), {_OURS}, (-0.9, 4.5))


def same_time(lines: Sequence[Line]) -> Drawn | None:
    """Loss against GPU time at two shapes: dense SiLU, and the sparse FFN of the same width.

    Each has its best optimizer and learning rates; its last mark has the range of its seeds.
    """
    found: dict[tuple[str, str], list[_Curve]] = defaultdict(list)
    for group in sweep_results.sweep_groups(lines):
        case = group.case
        which = group.sweep, case.get("activation"), case.get("target_nnz")
        kind = _SAME_TIME.get(which)  # type: ignore[arg-type]
        if kind is None or case["intermediate_size"] != 5632:
            continue
        if curve := _curve(group.lines, case["step"]):
            found[kind, case["precision"]].append(curve)
    curves = {key: _best(own) for key, own in found.items()}
    sparse = {kind for (_, activation, _), kind in _SAME_TIME.items() if activation == "relu"}
    return _drawn(curves, list(_SAME_TIME.values()), sparse, (-0.15, 1.7))


def _drawn(
    curves: dict[tuple[str, str], _Curve],
    order: Sequence[str],
    ours: Collection[str],
    limits: tuple[float, float],
) -> Drawn | None:
    """The curves by kind and precision; those of the kinds ``ours`` are thicker.

    ``limits`` of the losses are relative to the lowest end, in units of the spread of the ends.
    """
    kinds = [kind for kind in order if (kind, "fp8") in curves or (kind, "bf16") in curves]
    if len(kinds) < 2:
        return None
    figure, (axes,) = drawing.new_figure(1, size=(5.4, 4))  # legible on a phone
    ends = [loss for curve in curves.values() for loss in curve.ends]
    spread = max(ends) - min(ends)
    axes.set_ylim(*(min(ends) + limit * spread for limit in limits))
    axes.set_xlim(0, 1.2 * max(curve.seconds[-1] for curve in curves.values()))
    axes.tick_params(labelsize=11)
    named: list[_Named] = []
    for kind in kinds:
        color = drawing.color(_STYLES[kind])
        own = [curves[kind, p] for p in ("bf16", "fp8") if (kind, p) in curves]
        for curve in own:
            fill = color if curve is curves.get((kind, "fp8")) else drawing.PAGE
            x, y = curve.seconds[-1], curve.losses[-1]
            axes.vlines(x, min(curve.ends), max(curve.ends), color=color, linewidth=2)
            axes.plot(x, y, "o", color=color, markerfacecolor=fill, markersize=8, zorder=3)
        axes.plot(own[-1].seconds, own[-1].losses, color=color, linewidth=3 if kind in ours else 2)
        named.append((kind, color, own[-1].seconds, own[-1].losses))
    precisions = {precision for _, precision in curves}
    if len(precisions) > 1:
        for precision, fill in (("FP8", drawing.MUTED), ("bf16", drawing.PAGE)):
            axes.plot([], [], "o", color=drawing.MUTED, markerfacecolor=fill, label=precision)
        axes.legend(loc="upper right", fontsize=11)
    of_all = ", FP8" if precisions == {"fp8"} else ""
    x_label = f"GPU seconds of training{of_all}"
    axes.set(xlabel=x_label, ylabel="held-out loss, nats per token")
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)
    _name_ends(figure, axes, named)
    return figure, [line for curve in curves.values() for line in curve.lines]


_DENSE = "dense SiLU"
_OURS = "sparse, 4× wide, 60 active"
# Activation, neurons, target and whether there are experts; in the order of the styles.
_KINDS: dict[tuple[str, int, float | None, bool], str] = {
    ("silu", 2816, None, False): _DENSE,
    ("relu2", 2816, None, False): "dense ReLU²",
    ("relu", 11264, 60.0, False): _OURS,
    ("relu", 11264, 150.0, False): "150 active",
    ("silu", 11264, None, False): "dense, 4× wide",
    ("silu", 11264, None, True): "mixture of experts",
}
# Sweep, activation and target.
_SAME_TIME: dict[tuple[str, str, float | None], str] = {
    ("frontier-0.5b", "silu", None): "0.5B, dense SiLU",
    ("frontier-0.5b", "relu", 60.0): "0.5B, sparse",
    ("frontier-2b", "silu", None): "2B, dense SiLU",
    ("frontier-2b", "relu", 60.0): "2B, sparse",
}
_STYLES = dict(zip(_KINDS.values(), (0, 4, 1, 5, 3, 6), strict=True)) | dict(
    zip(_SAME_TIME.values(), (0, 1, 0, 1), strict=True)
)


def _frontier_curves(lines: Sequence[Line]) -> dict[tuple[str, str], _Curve]:
    """By kind and precision, at the best learning rate of all GPUs.

    Of runs that were trained to the end with their GPU time recorded. All are of one kind of GPU,
    that on which the most kinds of FFN were trained at their best rate.
    """
    # Of each kind, precision and learning rate, which name the runs differently: the seeds' lines.
    found: dict[tuple[str, str, float, str], list[Line]] = defaultdict(list)
    for group in sweep_results.sweep_groups(lines):
        case = group.case
        keys = ("activation", "intermediate_size", "target_nnz")
        kind = _KINDS.get((*(case.get(key) for key in keys), "experts" in case))  # type: ignore[arg-type]
        usual = not ("reinit" in group.name or "-first-" in group.name or "optimizer" in case)
        if group.sweep == "frontier" and kind and usual and case["gated"] and group.gpu_seconds:
            found[kind, case["precision"], case["learning_rate"], group.gpu] += group.lines
    last = max((line["case"]["step"] for own in found.values() for line in own), default=0)
    curves = {key: curve for key, own in found.items() if (curve := _curve(own, last))}
    tried: dict[tuple[str, str], list[_Curve]] = defaultdict(list)
    for (kind, precision, _, _), curve in curves.items():
        tried[kind, precision].append(curve)
    best = {key: _best(own).lines[0]["case"]["learning_rate"] for key, own in tried.items()}
    by_gpu: dict[str, dict[tuple[str, str], _Curve]] = defaultdict(dict)
    for (kind, precision, rate, gpu), curve in curves.items():
        if rate == best[kind, precision]:
            by_gpu[gpu][kind, precision] = curve
    return max(by_gpu.values(), key=lambda own: len({kind for kind, _ in own}), default={})


def _best(curves: Sequence[_Curve]) -> _Curve:
    """The curve that ends lowest, or one with more seeds that ends as low but for noise."""
    lowest = min(curve.losses[-1] for curve in curves)
    near = [curve for curve in curves if min(curve.ends) <= lowest + _NOISE]
    return max(near, key=lambda curve: (len(curve.ends), -curve.losses[-1]))


def _curve(lines: list[Line], last: int) -> _Curve | None:
    """The seeds' mean at every validation; None if no seed came to the step ``last``."""
    by_step: dict[str, dict[int, dict[int, float]]] = {"validation_loss": {}, "gpu_seconds": {}}
    for line in lines:
        if line["metric"] in by_step:
            case = line["case"]
            of_step = by_step[line["metric"]].setdefault(case["step"], {})
            of_step[case["seed"]] = line["value"]
    losses, seconds = by_step["validation_loss"], by_step["gpu_seconds"]
    seeds = losses.get(last, {}).keys() & seconds.get(last, {}).keys()
    if not seeds:
        return None
    steps = [step for step in sorted(losses) if seeds <= losses[step].keys() & seconds[step].keys()]
    return _Curve(
        [fmean(seconds[step][seed] for seed in seeds) for step in steps],
        [fmean(losses[step][seed] for seed in seeds) for step in steps],
        [losses[last][seed] for seed in seeds],
        lines,
    )


def _name_ends(figure: Figure, axes: Axes, lines: Sequence[_Named]) -> None:
    """Writes each line's name near its end, where it covers the least of lines and other names.

    Args:
        figure: with nothing else to add that moves the axes.
        axes: with limits, scales and lines set.
        lines: name, colour, x and y of each.
    """
    figure.draw_without_rendering()  # decides where the axes are
    frame, taken = axes.get_window_extent().padded(-3), list[Any]()
    drawn = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    points = np.concatenate([_along(corners) for corners in drawn if len(corners)])
    for name, color, x, y in lines:
        tried = []
        for across, up in _PLACES:
            text = axes.annotate(
                name, (x[-1], y[-1]), xytext=(across, up), textcoords="offset points",
                ha=("right", "center", "left")[int(np.sign(across)) + 1],
                va=("top", "center", "bottom")[int(np.sign(up)) + 1],
                fontsize=11, color=color, zorder=4,
                bbox={"facecolor": drawing.PAGE, "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
            )  # fmt: skip
            box = text.get_window_extent().padded(3)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0
            covered = int(box.count_contains(points)) + 200 * box.count_overlaps(taken)
            tried.append((9 * covered + 2 * abs(up) + 1000 * outside, text, box))
        _, best, box = min(tried, key=lambda one: one[0])
        taken.append(box)
        for _, text, _ in tried:
            if text is not best:
                text.remove()


# Points across and up from a line's end, which comes from the left; the best one comes first.
_PLACES = [(a, u) for u in (-8, 0, 8, -22, 22, -40, 40, 58) for a in (-30, -9, 0, 9) if u or a > 0]


def _along(corners: Any) -> Any:
    """Points (200, 2) along a line with these corners."""
    at, known = np.linspace(0, len(corners) - 1, 200), range(len(corners))
    return np.column_stack([np.interp(at, known, corners[:, axis]) for axis in (0, 1)])
