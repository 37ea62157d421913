"""A sweep's figure: loss, scores, speed and energy of its groups against their non-zeros."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from sparsellm.report import drawing
from sparsellm.report.drawing import Point
from sparsellm.report.sweep_runs import Group, SweepData, last_nnz, mean_score

TITLE = "Quality and speed against non-zeros"
_NNZ = "non-zeros per token, mean over layers"
_NO_FORWARD = "no forward was measured (`sparsellm bench forward RUN… --record DIR/bench.jsonl`)"


class Panel(NamedTuple):
    """One quantity of a sweep's groups."""

    title: str
    unit: str
    points: Callable[[Group], list[Point]]  # non-zeros and the quantity, of each seed
    missing: str = ""  # why no group may have it, and the remedy
    from_zero: bool = False


def _losses(g: Group) -> list[Point]:
    return [(last_nnz(run), run.validation[-1]["loss"]) for run in g.runs if run.validation]


def _scores(g: Group) -> list[Point]:
    found = [(last_nnz(run), mean_score(run)) for run in g.runs]
    return [(nnz, 100 * score) for nnz, score in found if score is not None]


def _rates(g: Group) -> list[Point]:
    return [(g.nnz, g.tokens_per_second / 1e3)]


def _forwards(metric: str) -> Callable[[Group], list[Point]]:
    return lambda g: [(g.nnz, r["ratio"]) for r in g.measured("model_forward", metric)]


LOSS = Panel(
    "Held-out loss",
    "nats per token",
    _losses,
    "no run has a held-out loss (validation.every_steps)",
)
PANELS = (
    LOSS,
    Panel(
        "Mean task score",
        "% right",
        _scores,
        "no run has a mean task score (evaluation.every_steps, or `sparsellm eval RUN`)",
    ),
    Panel("Training", "thousand tokens/s", _rates, from_zero=True),
    Panel("Forward of the model: speed", "× dense", _forwards("tokens_per_ms"), _NO_FORWARD),
    Panel(
        "Forward of the model: energy", "dense over sparse", _forwards("mJ_per_token"), _NO_FORWARD
    ),
)


def draw_sweep(sweep: SweepData) -> tuple[str, list[str]]:
    """The figure as SVG, and a sentence for each panel that has no data.

    Groups that differ in λ alone are one curve, with λ at its points.
    """
    shown = [panel for panel in PANELS if any(panel.points(g) for g in sweep.groups)]
    missing = [f"{panel.title}: {panel.missing}." for panel in PANELS if panel not in shown]
    columns = min(len(shown), 3) if len(shown) != 4 else 2
    rows = -(-len(shown) // columns)
    with drawing.style():
        figure, places = drawing.new_figure(columns, rows, size=(4.5 * columns, 3.8 * rows))
        for unused in places[len(shown) :]:
            unused.remove()
        for panel, axes in zip(shown, places, strict=False):
            for index, own in sweep.families():
                several = len(own) > 1
                texts = [drawing.exponent(g.l1_coefficient) if several else "" for g in own]
                name = own[0].name
                if several:  # without the value that `each` appended
                    name = re.sub(r"-[\d.]+(e-?\d+)?$", "", name) + ", λ at each point"
                members = list(zip(texts, map(panel.points, own), strict=True))
                drawing.series(axes, name, members, index)
            if panel is LOSS and sweep.dense_relu:
                drawing.dense_lines(axes, sweep.dense_relu)
            drawing.label(axes, panel.title, _NNZ, panel.unit)
            drawing.log_scale(axes.xaxis)
            if panel.from_zero:
                drawing.from_zero(axes)
        drawing.legend_beside(figure, places[: len(shown)])
        return drawing.svg_text(figure, TITLE, sweep.taken_on), missing
