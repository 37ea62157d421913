"""A sweep's figures: those of the paper for which it has records and analyses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sparsellm.report import drawing
from sparsellm.report import sweep_curves as curves
from sparsellm.report import sweep_panels as panels
from sparsellm.report.sweep_panels import Panel
from sparsellm.report.sweep_runs import SweepData

FIGURES: dict[str, tuple[str, list[Panel]]] = {
    "quality_and_speed": (
        "Quality and speed against non-zeros",
        [panels.loss_by_nnz, panels.score_by_nnz, panels.rate_by_nnz, panels.forward_by_nnz],
    ),
    "against_the_paper": (
        "Beside the paper's 1.5B and its other sizes (arXiv 2603.23198)",
        [panels.loss_beside_paper, panels.score_beside_paper, panels.forward_beside_paper],
    ),
    "against_lambda": ("Against λ", panels.panels_by("λ")),
    "against_target": ("Against the target", panels.panels_by("target")),
    "against_size": ("Against the size of the model", panels.panels_by("size")),
    "training": (
        "Over training",
        [
            curves.nnz_over_training,
            curves.dead_over_training,
            curves.loss_over_training,
            curves.l1_over_training,
        ],
    ),
    "layers_and_positions": (
        "By layer and by position, at the last record",
        [curves.by_layer, curves.by_position],
    ),
    "layer_speed": ("A layer's non-zeros against its speed-up", [curves.layer_speed]),
    "active_tokens": (
        "Least and most active tokens of the sparsest run that was analysed",
        [curves.active_tokens("lowest"), curves.active_tokens("highest")],
    ),
}


class SweepFigure(NamedTuple):
    """A figure of the report."""

    name: str  # of its file
    title: str
    svg: str | None  # None: none of its panels could be drawn
    missing: list[str]  # a sentence for each panel that could not be drawn


def sweep_figures(sweep: SweepData) -> Iterator[SweepFigure]:
    """Draws the figures for which there are records and analyses."""
    with drawing.style():
        for name, (title, of_figure) in FIGURES.items():
            yield _drawn(sweep, name, title, of_figure)


def _drawn(sweep: SweepData, name: str, title: str, of_figure: list[Panel]) -> SweepFigure:
    figure, axes = drawing.new_figure(len(of_figure))
    missing, drawn = dict[str, None](), []  # panels may share a reason
    for draw, own in zip(of_figure, axes, strict=True):
        reason = draw(sweep, own)
        if reason is None:
            drawn.append(own)
        else:
            own.remove()
            missing[reason] = None
    if not drawn:
        return SweepFigure(name, title, None, list(missing))
    # Resize to the remaining panels: the grid was made for all of them.
    columns = len(drawn) if len(drawn) <= 3 else 2 if len(drawn) == 4 else 3
    rows = -(-len(drawn) // columns)
    grid = figure.add_gridspec(rows, columns)
    for place, own in enumerate(drawn):
        own.set_subplotspec(grid[divmod(place, columns)])
    figure.set_size_inches(4.5 * columns, 3.8 * rows)
    drawing.legend_beside(figure, drawn)
    return SweepFigure(name, title, drawing.svg_text(figure, title, sweep.taken_on), list(missing))
