"""``sparsellm report --sweep``: one page of a sweep with its table, figure and every run."""

from __future__ import annotations

import base64
import json
import math
import re
import statistics
from html import escape
from pathlib import Path
from typing import Any

from sparsellm.arguments import check_out
from sparsellm.report.page import REPORT_FILE, SweepSection, render_page
from sparsellm.report.sweep_figure import TITLE, draw_sweep
from sparsellm.report.sweep_runs import Group, SweepData, read_sweep, spread
from sparsellm.report.tables import html_table
from sparsellm.runs.files import write_atomically

SUMMARY_FILE = "summary.json"
TABLE_FILE = "summary.md"
FIGURE_FILE = "summary.svg"
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
    "± half their range."
)


def write_sweep_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes page, summary and figure into the sweep's folder; returns the files, the page first.

    Raises:
        FileNotFoundError: the folder is not a sweep.
        ValueError: a file is damaged, or the page cannot be written.
    """
    out = out or folder / REPORT_FILE
    check_out(out)
    sweep = read_sweep(folder)
    rows = [_row(sweep, group) for group in sweep.groups]
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary(sweep), indent=1) + "\n")
    note = " ".join([NOTE, *_caveats(sweep)])
    write_atomically(folder / TABLE_FILE, _markdown(rows, note))
    svg, missing = draw_sweep(sweep)
    write_atomically(folder / FIGURE_FILE, svg)
    parts = [
        html_table(f"Groups of the sweep {sweep.name}", HEAD, rows),
        f"<p class='note'>{escape(note)}</p>",
        _figure(svg, missing),
    ]
    runs = [run for group in sweep.groups for run in group.runs]
    section = SweepSection(sweep.name, sweep.description, "\n".join(parts))
    write_atomically(out, render_page(runs, section))
    return [out, folder / TABLE_FILE, folder / SUMMARY_FILE, folder / FIGURE_FILE]


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


def _figure(svg: str, missing: list[str]) -> str:
    """The figure with its title, and notes on panels that could not be drawn."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    texts = [re.sub("`(.+?)`", r"<code>\1</code>", escape(text)) for text in missing]
    notes = "".join(f"<p class='note'>{text}</p>" for text in texts)
    return (
        f"<figure class='chart'><figcaption><h3>{TITLE}</h3></figcaption>"
        f"<div class='figure'><img alt='{TITLE}' src='{source}'></div>{notes}</figure>"
    )
