"""``sparsellm report --sweep``: one page of a sweep with its table, figure and every run."""

import base64
import json
import re
import statistics
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

from sparsellm.arguments import check_out
from sparsellm.report import drawing
from sparsellm.report.collect import RunData
from sparsellm.report.page import REPORT_FILE, render_page
from sparsellm.report.sweep_runs import Group, SweepData, last_nnz, mean_score, read_sweep
from sparsellm.report.tables import html_table
from sparsellm.runs.files import write_atomically
from sparsellm.words import markdown_table

SUMMARY_FILE = "summary.json"
TABLE_FILE = "summary.md"
FIGURE_FILE = "summary.svg"
TITLE = "Quality and speed against non-zeros"
NOTE = (
    "Non-zeros: last tenth of the steps, mean over layers. Loss: nats per token, mean of the seeds "
    "± half their range. Against dense: over the seeds that both have."
)

# What the table says of a group, by the column's head.
COLUMNS: dict[str, Callable[[SweepData, Group], str]] = {
    "Group": lambda sweep, g: g.group,
    "Seeds": lambda sweep, g: str(len(g.seeds)),
    "λ at the end": lambda sweep, g: f"{g.l1_coefficient:.3g}",
    "Non-zeros per token": lambda sweep, g: f"{g.nnz:,.1f}",
    "Zeros": lambda sweep, g: f"{g.zeros:.2%}",
    "Dead": lambda sweep, g: f"{g.dead_fraction:.1%}",
    "Validation loss": lambda sweep, g: _loss(g.held_out_losses),
    "Against dense ReLU": lambda sweep, g: _against(g, sweep.dense_relu),
    "Against SiLU": lambda sweep, g: _against(g, sweep.silu),
    "Training tokens/s": lambda sweep, g: f"{g.tokens_per_second:,.0f}",
    "Forward, × dense": lambda sweep, g: (
        "–" if g.forward_ratio is None else f"{g.forward_ratio:.2f}"
    ),
    "Mean task score": lambda sweep, g: (
        f"{statistics.fmean(g.mean_scores):.1%}" if g.mean_scores else "–"
    ),
}


class Panel(NamedTuple):
    """One quantity of the figure."""

    title: str
    unit: str
    points: Callable[[Group], list[drawing.Point]]  # non-zeros and the quantity, of each seed
    missing: str = ""  # why it may be missing in all groups, and the remedy
    from_zero: bool = False


def _forwards(metric: str) -> Callable[[Group], list[drawing.Point]]:
    return lambda g: [(g.nnz, ratio) for ratio in g.forward_ratios[metric]]


_NNZ = "non-zeros per token, mean over layers"
_NO_FORWARD = "no forward was measured (`sparsellm bench forward RUN… --record DIR/bench.jsonl`)"
LOSS = Panel(
    "Validation loss",
    "nats per token",
    lambda g: [(last_nnz(run), run.validation[-1]["loss"]) for run in g.runs if run.validation],
    "no run has a validation loss (validation.every_steps)",
)
PANELS = (
    LOSS,
    Panel(
        "Mean task score",
        "% right",
        lambda g: [(last_nnz(r), 100 * s) for r in g.runs if (s := mean_score(r)) is not None],
        "no run has a mean task score (evaluation.every_steps, or `sparsellm eval RUN`)",
    ),
    Panel(
        "Training",
        "thousand tokens/s",
        lambda g: [(g.nnz, g.tokens_per_second / 1e3)],
        from_zero=True,
    ),
    Panel("Forward of the model: speed", "× dense", _forwards("tokens_per_ms"), _NO_FORWARD),
    Panel(
        "Forward of the model: energy", "dense over sparse", _forwards("mJ_per_token"), _NO_FORWARD
    ),
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
    summary = [g.summary() for g in sweep.groups]
    rows = [[text(sweep, g) for text in COLUMNS.values()] for g in sweep.groups]
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
    note = " ".join([NOTE, *_caveats(sweep)])
    write_atomically(folder / TABLE_FILE, f"{markdown_table(list(COLUMNS), rows)}\n{note}\n")
    svg, missing = draw_sweep(sweep)
    write_atomically(folder / FIGURE_FILE, svg)
    parts = [
        html_table(f"Groups of the sweep {sweep.name}", list(COLUMNS), rows),
        f"<p class='note'>{escape(note)}</p>",
        _figure(svg, missing),
    ]
    write_atomically(out, render_page(sweep.runs, sweep, "\n".join(parts)))
    return [out, folder / TABLE_FILE, folder / SUMMARY_FILE, folder / FIGURE_FILE]


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
            for index, family in sweep.families():
                several = len(family) > 1
                texts = [drawing.exponent(g.l1_coefficient) if several else "" for g in family]
                name = family[0].group
                if several:  # without the value that `each` appended
                    name = re.sub(r"-[\d.]+(e-?\d+)?$", "", name) + ", λ at each point"
                members = list(zip(texts, map(panel.points, family), strict=True))
                drawing.series(axes, name, members, index)
            if panel is LOSS and (dense := sweep.dense_relu) and dense.held_out_losses:
                drawing.dense_lines(axes, statistics.fmean(dense.held_out_losses))
            axes.set(title=panel.title, xlabel=_NNZ, ylabel=panel.unit)
            drawing.log_scale(axes.xaxis)
            if panel.from_zero:
                drawing.from_zero(axes)
        drawing.legend_beside(figure, places[: len(shown)])
        return drawing.svg_text(figure, TITLE, sweep.measured_on), missing


def _loss(losses: list[float]) -> str:
    if not losses:
        return "–"
    half_range = (max(losses) - min(losses)) / 2
    spread = f"\u00a0±\u00a0{half_range:.4f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{spread}"


def _against(group: Group, baseline: Group | None) -> str:
    """The change of the mean loss, over the seeds of both: a seed moves the losses of all alike."""
    losses, dense_losses = group.loss_by_seed, baseline.loss_by_seed if baseline else {}
    if not (seeds := losses.keys() & dense_losses.keys()):
        return "–"
    ratio = sum(losses[seed] for seed in seeds) / sum(dense_losses[seed] for seed in seeds)
    return f"{ratio - 1:+.2%}".replace("-", "−")


def _caveats(sweep: SweepData) -> list[str]:
    newest = [run.evaluations[-1] for run in sweep.runs if run.evaluations]
    left_out = [run for g in sweep.groups for run in g.left_out]
    partial = [run for g in sweep.groups for run in g.runs if not run.is_whole]
    early = [  # the last validation may have failed
        f"{run.label} (step {run.validation[-1]['step']:,} of {run.end['step']:,})"
        for g in sweep.groups
        for run in g.runs
        if run.validation and run.validation[-1]["step"] < run.end["step"]
    ]
    return [
        *([f"Not trained to the end: {_how_far(partial)}."] if partial else []),
        *(
            [f"Not trained to the end, and left out of their groups: {_how_far(left_out)}."]
            if left_out
            else []
        ),
        *([f"Validated before the last step: {', '.join(early)}."] if early else []),
        *_unlike(sweep),
        *(f"Scores: {caveat}." for caveat in sorted({e.caveat for e in newest} - {""})),
    ]


def _unlike(sweep: SweepData) -> list[str]:
    """What makes the losses of groups hard to compare: where they began, and how much they read."""
    origins = {g.group: g.runs[0].first_weights for g in sweep.groups}
    elsewhere = [f"{group} ({origin['name']})" for group, origin in origins.items() if origin]
    by_tokens: dict[int, list[str]] = {}
    for g in sweep.groups:
        by_tokens.setdefault(max(g.tokens), []).append(g.group)
    tokens = [f"{count:,} ({', '.join(groups)})" for count, groups in sorted(by_tokens.items())]
    return [
        *([f"Began with the weights of another run: {', '.join(elsewhere)}."] if elsewhere else []),
        *([f"Tokens trained on: {', '.join(tokens)}."] if len(tokens) > 1 else []),
    ]


def _how_far(runs: list[RunData]) -> str:
    steps = [(run.label, run.train[-1]["step"], run.recipe.train.steps) for run in runs]
    return ", ".join(f"{label} (step {at:,} of {of:,})" for label, at, of in steps)


def _figure(svg: str, missing: list[str]) -> str:
    """The figure with its title, and notes on panels that could not be drawn."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    texts = [re.sub("`(.+?)`", r"<code>\1</code>", escape(text)) for text in missing]
    notes = "".join(f"<p class='note'>{text}</p>" for text in texts)
    return (
        f"<figure class='chart'><figcaption><h3>{TITLE}</h3></figcaption>"
        f"<div class='figure'><img alt='{TITLE}' src='{source}'></div>{notes}</figure>"
    )
