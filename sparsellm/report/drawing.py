"""How every figure is drawn: colours, axes, and SVG that is legible on light and dark pages.

A figure is drawn and saved within `style`. Colours are those of the page's style.css; series use
them in turn, with a different marker each time the colours repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PAGE, TEXT, MUTED, LINE, GRID = "#ffffff", "#1b1f24", "#57606a", "#d0d7de", "#e3e7ec"
SERIES = (
    "#0072b2",
    "#d55e00",
    "#330000",
    "#7700ff",
    "#bb7777",
    "#000055",
    "#773300",
    "#553355",
)
# The replacement of each colour if the reader prefers dark pages.
DARK = {
    PAGE: "#14171b",
    TEXT: "#e8ebef",
    MUTED: "#a3adb8",
    LINE: "#3b434d",
    GRID: "#2b3139",
    "#0072b2": "#56b4e9",
    "#d55e00": "#f08a3c",
    "#330000": "#ffffff",
    "#7700ff": "#bb00ff",
    "#bb7777": "#99ff00",
    "#000055": "#777755",
    "#773300": "#dd0099",
    "#553355": "#ffbb99",
}
Point = tuple[float, float]
_MARKERS = "osD^vP*Xp<>h"
_STYLE: dict[str, Any] = {
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT,
    "axes.titlesize": 10,
    "axes.titlecolor": TEXT,
    "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # 4.3706, not 7.25 with an offset of 1e-6 + 4.37061
    "grid.color": GRID,
    "legend.facecolor": PAGE,
    "legend.edgecolor": LINE,
    "legend.framealpha": 1.0,
    "legend.fontsize": 8,
    "legend.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "font.family": ["DejaVu Sans"],  # matplotlib includes it: the same layout everywhere
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "sparsellm",  # the same figure always gives the same bytes
}


@contextmanager
def style() -> Iterator[None]:
    """Context in which figures get the colours and sizes of this module."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(
    columns: int, rows: int = 1, *, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row; ``size`` in inches."""
    # The object interface: no pyplot state, no display, no backend to choose.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size or (5.5 * columns, 4.5 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def log_scale(axis: Axis) -> None:
    """A logarithmic axis with 5 and 0.02, where matplotlib writes 5×10⁰ and 2×10⁻²."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    class Minor(LogFormatter):
        """Chooses which of the smaller ticks have room for a number, as matplotlib does."""

        def __call__(self, value: float, position: int | None = None) -> str:
            return plain(value) if super().__call__(value, position) else ""

    def plain(value: float, position: int | None = None) -> str:
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.12f}".rstrip("0").rstrip(".")

    axes = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(Minor(minor_thresholds=(1.0, 0.4)))


def from_zero(axes: Axes) -> None:
    """A linear y axis from zero, with room above the highest marker."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)


def series(
    axes: Axes, name: str, members: Sequence[tuple[str, Sequence[Point]]], index: int
) -> None:
    """Markers of every seed of one or more settings; several settings are joined by a line.

    Each member is a setting: the text beside it, or none, and the x and y of each seed. ``index``,
    the number of the series, decides its style.
    """
    members = sorted((m for m in members if m[1]), key=lambda m: fmean(x for x, _ in m[1]))
    if not members:
        return
    means = [(fmean(x for x, _ in points), fmean(y for _, y in points)) for _, points in members]
    style = points_style(index)
    if len(members) > 1:
        axes.plot(*zip(*means, strict=True), color=style["color"])
        axes.margins(y=0.1)  # room for the text
    points = [point for _, setting_points in members for point in setting_points]
    axes.plot(*zip(*points, strict=True), label=name, **style)
    for (text, _), (x, y), (_, after) in zip(members, means, [*means[1:], means[-1]], strict=True):
        # Beside the line to the next point, not on it.
        offset, side = ((5, 3), "bottom") if after <= y else ((5, -3), "top")
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8, va=side)


def exponent(value: float) -> str:
    """Text such as 3e-4 for 0.0003; rounded to six digits, since a mean of λ is not exact."""
    import numpy as np

    return np.format_float_scientific(float(f"{value:.6g}"), trim="-", exp_digits=1)


def dense_lines(axes: Axes, loss: float) -> None:
    """The validation loss of dense ReLU, and 1% more."""
    axes.axhline(loss, linestyle=":", color=MUTED, label="dense ReLU, mean")
    axes.axhline(loss * 1.01, linestyle="--", color=MUTED, label="1% above it")


def legend_beside(figure: Figure, axes: list[Axes]) -> None:
    """One legend to the right of all axes, each name once; the figure grows by its width."""
    entries: dict[str, Any] = {}
    for panel in axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if entries:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width + 0.6 + 0.075 * max(map(len, entries)), height)
        figure.legend(entries.values(), entries.keys(), loc="outside right upper")


def color(index: int) -> str:
    """The colour of the series with this number."""
    return SERIES[index % len(SERIES)]


def points_style(index: int) -> dict[str, Any]:
    """Markers without a line of the series with this number; 24 series can be told apart."""
    return {
        "color": color(index),
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": "none",
        "markersize": 7,
        "clip_on": False,  # whole markers at a limit such as 0
    }


def svg_text(figure: Figure, title: str, caption: str = "") -> str:
    """The figure as SVG, whose colours follow the reader's preference; the same bytes every time.

    Args:
        figure: drawn within `style`, in which this is called too.
        title: description for screen readers.
        caption: a line below the figure, such as hardware and commit.
    """
    if caption:
        figure.supxlabel(caption, fontsize=8, color=MUTED)
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    text = text.replace("</style>", f"{_dark_rules()}</style>", 1)
    # Viewers without the font use one that is as wide or narrower.
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def _dark_rules() -> str:
    """CSS for dark pages; elements have the light colours, for viewers without media queries."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    return "\n@media screen and (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
