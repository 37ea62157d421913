"""``sparsellm report --sweep``: one page of a sweep with its table, figures and every run."""

from __future__ import annotations

import base64
import json
import math
import re
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from sparsellm.arguments import check_out
from sparsellm.report import drawing
from sparsellm.report import sweep_panels as panels
from sparsellm.report.page import REPORT_FILE, SweepSection, render_page
from sparsellm.report.sweep_panels import Panel
from sparsellm.report.sweep_runs import Group, SweepData, read_sweep, spread
from sparsellm.report.tables import html_table
from sparsellm.runs.files import write_atomically

SUMMARY_FILE = "summary.json"
TABLE_FILE = "summary.md"
HEAD = [
    "Group",
    "Seeds",
    "λ at the end",
    "Non-zeros per token",
    "Zeros",
    "Dead",
    "Held-out loss",
    "Against dense ReLU",
    "Against SiLU",
    "Training tokens/s",
    "Forward, × dense",
    "Mean task score",
]
NOTE = (
    "Non-zeros: last tenth of the steps, mean over layers. Loss: nats per token, mean of the seeds "
    "± half their range. The paper's 1.5B (arXiv 2603.23198): dense ReLU 911 of 5,632 non-zeros, "
    "cross-entropy 2.255; SiLU 2.240 (−0.7%); λ 2e-5 29 non-zeros (99.5% zeros), 2.297 (+1.9%), "
    "forward 1.18 × dense. Its vocabulary is another one, so only ratios compare."
)
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
    "layer_speed": ("A layer's non-zeros against its speed-up", [panels.layer_speed]),
}


def write_sweep_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes page, summary and figures into the sweep's folder; returns the files, the page first.

    Raises:
        FileNotFoundError: the folder is not a sweep.
        ValueError: a file is damaged, or the page cannot be written.
    """
    out = out or folder / REPORT_FILE
    check_out(out)
    sweep = read_sweep(folder)
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    images, shown = [], []
    for figure in _figures(sweep):
        path = figures / f"{figure.name}.svg"
        if figure.svg is not None:
            write_atomically(path, figure.svg)
            images.append(path)
        else:
            path.unlink(missing_ok=True)  # figures of an earlier state of the sweep
        shown.append(_shown(figure))
    rows = [_row(sweep, group) for group in sweep.groups]
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary(sweep), indent=1) + "\n")
    note = " ".join([NOTE, *_caveats(sweep)])
    write_atomically(folder / TABLE_FILE, _markdown(rows, note))
    parts = [
        html_table(f"Groups of the sweep {sweep.name}", HEAD, rows),
        f"<p class='note'>{escape(note)}</p>",
        *shown,
    ]
    runs = [run for group in sweep.groups for run in group.runs]
    section = SweepSection(sweep.name, sweep.description, "\n".join(parts))
    write_atomically(out, render_page(runs, section))
    return [out, folder / TABLE_FILE, folder / SUMMARY_FILE, *images]


def summary(sweep: SweepData) -> list[dict[str, Any]]:
    """One entry per group, as plain numbers."""
    return [
        {
            "group": g.name,
            "seeds": [run.recipe.seed for run in g.runs],
            "steps": [run.train[-1]["step"] for run in g.runs],
            "tokens": [run.train[-1]["tokens"] for run in g.runs],
            "l1_coefficient": g.l1_coefficient,
            "nnz": g.nnz,
            "zeros": 1 - g.nnz / g.recipe.model.intermediate_size,
            "dead_fraction": g.dead,
            "held_out_losses": g.losses,
            "tokens_per_second": g.tokens_per_second,
            "forward_ratio": _forward(g),
            "mean_scores": g.scores,
        }
        for g in sweep.groups
    ]


def _row(sweep: SweepData, g: Group) -> list[str]:
    loss = statistics.fmean(g.losses) if g.losses else math.nan
    several = len(g.losses) > 1
    forward = _forward(g)
    return [
        g.name,
        ", ".join(str(run.recipe.seed) for run in g.runs),
        f"{g.l1_coefficient:.3g}",
        f"{g.nnz:,.1f}",
        f"{1 - g.nnz / g.recipe.model.intermediate_size:.2%}",
        f"{g.dead:.1%}",
        f"{loss:.4f}" + (f"\u00a0±\u00a0{spread(g.losses):.4f}" if several else ""),
        _against(loss, sweep.dense_relu),
        _against(loss, sweep.silu),
        f"{g.tokens_per_second:,.0f}",
        "–" if forward is None else f"{forward:.2f}",
        f"{statistics.fmean(g.scores):.1%}" if g.scores else "–",
    ]


def _forward(g: Group) -> float | None:
    found = [r["ratio"] for r in g.measured("model_forward", "tokens_per_ms")]
    return statistics.fmean(found) if found else None


def _against(loss: float, baseline: float | None) -> str:
    return "–" if baseline is None else f"{loss / baseline - 1:+.2%}".replace("-", "−")


def _caveats(sweep: SweepData) -> list[str]:
    newest = [run.evaluations[-1] for g in sweep.groups for run in g.runs if run.evaluations]
    return [f"Scores: {caveat}." for caveat in sorted({e.caveat for e in newest} - {""})]


def _markdown(rows: list[list[str]], note: str) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + f"\n{note}\n"


def _shown(figure: _Figure) -> str:
    """The figure with its title, and notes on panels that could not be drawn."""
    title = escape(figure.title)
    image = ""
    if figure.svg is not None:
        content = base64.b64encode(figure.svg.encode()).decode()
        source = f"data:image/svg+xml;base64,{content}"
        image = f"<div class='figure'><img alt='{title}' src='{source}'></div>"
    missing = [re.sub("`(.+?)`", r"<code>\1</code>", escape(text)) for text in figure.missing]
    notes = "".join(f"<p class='note'>{text}</p>" for text in missing)
    return f"<figure class='chart'><figcaption><h3>{title}</h3></figcaption>{image}{notes}</figure>"


class _Figure(NamedTuple):
    """A figure of the report."""

    name: str  # of its file
    title: str
    svg: str | None  # None: none of its panels could be drawn
    missing: list[str]  # a sentence for each panel that could not be drawn


def _figures(sweep: SweepData) -> Iterator[_Figure]:
    """Draws the figures for which there are records and analyses."""
    with drawing.style():
        for name, (title, of_figure) in FIGURES.items():
            yield _drawn(sweep, name, title, of_figure)


def _drawn(sweep: SweepData, name: str, title: str, of_figure: list[Panel]) -> _Figure:
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
        return _Figure(name, title, None, list(missing))
    # Resize to the remaining panels: the grid was made for all of them.
    columns = len(drawn) if len(drawn) <= 3 else 2 if len(drawn) == 4 else 3
    rows = -(-len(drawn) // columns)
    grid = figure.add_gridspec(rows, columns)
    for place, own in enumerate(drawn):
        own.set_subplotspec(grid[divmod(place, columns)])
    figure.set_size_inches(4.5 * columns, 3.8 * rows)
    drawing.legend_beside(figure, drawn)
    return _Figure(name, title, drawing.svg_text(figure, title, sweep.taken_on), list(missing))
