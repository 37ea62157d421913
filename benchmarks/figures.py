"""Draws figures of docs/figures/ from records: loss against GPU time, zeros, speed of one FFN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import results
from published import PUBLISHED_KERNELS
from results import SHAPE, Line, Run, measured, runs
from sparsellm.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = results.FOLDER.parent / "docs" / "figures"


def draw_all(lines: Sequence[Line]) -> dict[str, str]:
    """The SVG of each figure by file name; equal records give equal bytes.

    The text must be saved as UTF-8 with line feeds.
    """
    with drawing.style():
        return {
            f"{name}.svg": drawing.svg_text(draw(lines), title, caption)
            for name, (title, caption, draw) in FIGURES.items()
        }


class _Curve(NamedTuple):
    """A line of loss against GPU time, as the mean of its runs."""

    name: str
    sweep: str
    run: str
    color: int
    offset: tuple[float, float]  # of its name from the line's end, in points


_SAME_TIME = (
    _Curve("0.5B, dense SiLU", "frontier-0.5b", "dense-silu-muon-fp8-0.002-*", 0, (62, 8)),
    _Curve(
        "0.5B, sparse", "frontier-0.5b",
        "wide1-target60-longer-muon-gates-slower-fp8-0.00025-*", 1, (50, -8),
    ),
    _Curve(
        "0.5B, half as wide", "fair-0.5b", "dense-silu-narrow-longer-0.000125-*", 3, (-16, -15),
    ),
    _Curve("2B, dense SiLU", "fair-2b", "dense-silu-0.00015-*", 0, (0, 14)),
    _Curve("2B, sparse", "fair-2b", "target60-longer-0.0003-*", 1, (18, 14)),
    _Curve("2B, half as wide", "fair-2b", "dense-silu-narrow-same-time-*", 3, (0, -14)),
)  # fmt: skip
_LONG = (
    _Curve("dense SiLU, 111M", "frontier-0.5b-long", "dense-silu-0.002-*", 0, (-8, -14)),
    _Curve("dense SiLU, 90M", "fair-long", "dense-silu-muon-gates-shorter-1380-*", 0, (30, 24)),
    _Curve("dense, half as wide", "fair-long", "dense-silu-narrow-2816-*", 3, (-20, -38)),
    _Curve("sparse, 60 active", "fair-long", "target60-0.00025-*", 1, (-92, -8)),
)


def _same_time(lines: Sequence[Line]) -> Figure:
    return _against_time(lines, _SAME_TIME, (3.7, 5.4))


def _long(lines: Sequence[Line]) -> Figure:
    return _against_time(lines, _LONG, (3.45, 4.3))


def _against_time(
    lines: Sequence[Line], curves: Sequence[_Curve], limits: tuple[float, float]
) -> Figure:
    """A line for each kind of FFN; its last mark has the range of the seeds."""
    figure, (axes,) = drawing.new_figure(1, size=(5.4, 4))  # legible on a phone
    last = 0.0
    pointer = {"arrowstyle": "-", "linewidth": 0.7}
    for name, sweep, run, index, offset in curves:
        group = runs(lines, sweep, run)
        seconds, losses = _mean_of_seeds(group)
        color, last = drawing.color(index), max(last, seconds[-1])
        ends = [run.last("validation_loss") for run in group]
        axes.plot(seconds, losses, color=color, linewidth=3 if "sparse" in name else 2)
        axes.vlines(seconds[-1], min(ends), max(ends), color=color, linewidth=2)
        axes.plot(seconds[-1], losses[-1], "o", color=color, markersize=8, zorder=3)
        axes.annotate(
            name, (seconds[-1], losses[-1]), xytext=offset, textcoords="offset points",
            ha="center", va="center", fontsize=10, color=color, zorder=4,
            arrowprops=pointer | {"color": color} if abs(offset[1]) > 20 else None,
        )  # fmt: skip
    axes.set(xlim=(0, 1.15 * last), ylim=limits)
    axes.set(xlabel="GPU seconds of training, FP8", ylabel="validation loss, nats per token")
    axes.tick_params(labelsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(11)
    return figure


def _mean_of_seeds(group: Sequence[Run]) -> tuple[list[float], list[float]]:
    """GPU seconds and losses at every validation."""
    losses = [run.by_metric["validation_loss"] for run in group]
    seconds = [run.by_metric["gpu_seconds"] for run in group]
    steps = list(losses[0])
    return (
        [fmean(of_run[step] for of_run in seconds) for step in steps],
        [fmean(of_run[step] for of_run in losses) for step in steps],
    )


# Name in the legend, runs of the sweep `quality`, number of the style.
_QUALITY = (
    ("L1, λ at each point", ("l1-1e-05-*", "l1-3e-05-*", "l1-0.0001-*", "l1-0.0003-*",
                             "l1-0.0006-*", "l1-0.001-*", "l1-0.003-*", "l1-0.01-*"), 0),
    ("dense ReLU", ("dense-relu-*",), 1),
    ("dense SiLU", ("dense-silu-*",), 2),
    ("target of 30", ("target-30-seed*",), 3),
)  # fmt: skip


def _zeros(lines: Sequence[Line]) -> Figure:
    """Validation loss and throughput against active neurons."""
    figure, (loss, throughput) = drawing.new_figure(2, size=(9, 4.2))
    for title, names, index in _QUALITY:
        groups = [runs(lines, "quality", name) for name in names]
        for axes, metric, scale in ((loss, "validation_loss", 1), (throughput, "throughput", 1e3)):
            points = []
            for group in groups:
                written = metric == "validation_loss" and len(names) > 1
                text = drawing.exponent(group[0].case["l1_coefficient"]) if written else ""
                values = [(run.last("nnz"), run.last(metric) / scale) for run in group]
                points.append((text, values))
            drawing.series(axes, title, points, index)
    loss.set(title="Validation loss", xlabel=_ACTIVE, ylabel="nats per token")
    throughput.set(title="Training", xlabel=_ACTIVE, ylabel="thousand tokens/s")
    drawing.from_zero(throughput)
    for axes in (loss, throughput):
        drawing.log_scale(axes.xaxis)
    drawing.legend_beside(figure, [loss, throughput])
    return figure


_ACTIVE = "active neurons per token"
_NNZ = (15, 30, 60, 120, 300)
_MARKERS = {"uniform": "o", "skewed": "s"}


def _ffn_speed(lines: Sequence[Line]) -> Figure:
    """Speed over dense against active neurons: forward, and forward and backward."""
    figure, panels = drawing.new_figure(2)
    titles = ("FFN forward", "FFN forward and backward, training")
    for axes, title, bench in zip(panels, titles, ("ffn_forward", "ffn_train"), strict=True):
        for pattern, marker in _MARKERS.items():
            for name, format, index in (("union", None, 0), ("TwELL (ours)", "twell", 3)):
                cases = [SHAPE | {"pattern": pattern, "nnz": n, "format": format} for n in _NNZ]
                records = [measured(lines, bench, "ms", case) for case in cases]
                points = [(line["case"]["nnz"], line["ratio"]) for line in records if line]
                _speeds(axes, points, f"{name}, {pattern}", index, marker)
            points = [
                (
                    kernel.nnz,
                    1
                    / (kernel.forward if bench == "ffn_forward" else kernel.forward_backward).ratio,
                )
                for kernel in PUBLISHED_KERNELS
                if kernel.pattern == pattern
            ]
            _speeds(axes, points, f"published kernels, {pattern}", 2, marker)
        axes.axhline(1.0, color=drawing.MUTED, linestyle="--", label="dense (cuBLAS, compiled)")
        axes.set(title=title, xlabel=_ACTIVE, ylabel="speed over dense")
        drawing.log_scale(axes.xaxis)
        axes.set_xlim(10, 400)
        axes.set_xticks(_NNZ, list(map(str, _NNZ)))
        axes.set_ylim(bottom=0)
    figure.suptitle("One FFN, 16,384 tokens at 2048/5632, bf16")
    drawing.legend_beside(figure, panels)
    return figure


def _speeds(axes: Axes, points: Sequence[Any], name: str, index: int, marker: str) -> None:
    color = drawing.color(index)
    axes.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=1, label=name)


FIGURES: dict[str, tuple[str, str, Callable[[Sequence[Line]], Figure]]] = {
    "frontier-same-time": (
        "Validation loss against GPU time at the shapes of 0.5b and 2b, dense and sparse FFNs",
        "Muon; mean of two seeds; NVIDIA H200",
        _same_time,
    ),
    "frontier-long": (
        "Validation loss against GPU time at the shape of 0.5b over 111M and 90M tokens",
        "Muon; NVIDIA H200; one seed (dense, 111M: two, with older code)",
        _long,
    ),
    "quality_and_speed": (
        "Validation loss and training throughput against active neurons",
        "Sweep quality: 5 layers of 1024, 39M tokens; NVIDIA H200",
        _zeros,
    ),
    "ffn_speed": (
        "Speed of one FFN over dense, against active neurons per token",
        "NVIDIA H200",
        _ffn_speed,
    ),
}
