"""The report: one page of template, style, scripts, a verdict, tables and data."""

import json
import re
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from sparsellm import __version__
from sparsellm.arguments import check_out
from sparsellm.report import tables
from sparsellm.report.collect import RunData, Sample, read_runs
from sparsellm.report.series import chart_specs, run_series
from sparsellm.report.sweep_runs import SweepData
from sparsellm.runs.files import write_atomically
from sparsellm.runs.telemetry.metrics import against_target, mean

REPORT_FILE = "report.html"
# What a verdict calls odd.
RISEN = 0.01  # rise of the validation loss above its lowest value, relative
OFF_TARGET = 0.1  # difference of the non-zeros from their target, relative
MANY_DEAD = 0.5  # share of the neurons
_FOLDER = Path(__file__).with_name("assets")
_SCRIPTS = ("scales.js", "elements.js", "lines.js", "heatmap.js", "main.js")


def write_report(run_paths: list[Path], out: Path | None = None) -> Path:
    """Writes the page of these runs; returns its file.

    By default it is ``report.html`` in the run's folder, or in the working directory if there are
    several runs.

    Raises:
        FileNotFoundError: a folder is not a run.
        ValueError: a path is a file, a run has no record yet, a file of it is damaged, or the page
            cannot be written.
    """
    for path in run_paths:
        if path.is_file():
            raise ValueError(f"{path} is a file; give the run's folder, such as {path.parent}")
    alone = len({path.resolve() for path in run_paths}) == 1
    out = out or (run_paths[0] / REPORT_FILE if alone else Path(REPORT_FILE))
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render_page(read_runs(run_paths)))
    return out


def render_page(runs: list[RunData], sweep: SweepData | None = None, about: str = "") -> str:
    """The HTML of the report, which loads nothing else from network or disk.

    Args:
        runs: what is drawn.
        sweep: the sweep that they belong to.
        about: HTML about the sweep, with which the page begins.
    """
    names, description = ", ".join(run.label for run in runs), runs[0].recipe.description
    if len(runs) > 1:
        description = f"{len(runs)} runs in one set of charts"
    if sweep:
        names, description = sweep.name, sweep.description
    # One function scope for all scripts: no global names.
    script = "\n".join(_file(name) for name in _SCRIPTS)
    parts = {
        "TITLE": escape(f"{names}: sparsellm report"),
        "STYLE": _file("style.css"),
        "HEADING": escape(names if sweep or len(runs) <= 3 else f"{len(runs)} runs"),
        "DESCRIPTION": escape(description),
        "SWEEP": _sweep_section(about, len(runs)) if sweep else "",
        "VERDICT": "" if sweep else "\n".join(_verdict_section(r, len(runs) > 1) for r in runs),
        "SUMMARY": tables.summary_table(runs),
        "EVALUATION": tables.evaluation_table(runs),
        "LAYERS": tables.layer_tables(runs) + tables.analysis_tables(runs),
        "DIFFERENCES": tables.difference_table(runs),
        "RECIPES": tables.recipes(runs),
        "VERSION": escape(__version__),
        "DATA": json_for_script({"runs": [run_series(run) for run in runs], **chart_specs(runs)}),
        "SCRIPT": f'(() => {{\n"use strict";\n{script}\n}})();',
    }
    # A single pass: inserted text is not searched for placeholders.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def verdict(run: RunData) -> list[str]:
    """A run's loss, zeros and speed in sentences; what is odd about it follows after "Odd:"."""
    end = run.train[-1]
    step, tokens = run.end["step"], run.end["tokens"]
    sentences = [f"{step:,} of {run.recipe.train.steps:,} steps, {tokens:,} tokens."]
    if run.validation:
        last = run.validation[-1]
        at = "" if last["step"] == step else f" after step {last['step']:,}"
        sentences.append(f"The validation loss{at} is {last['loss']:.4f} nats per token.")
    elif end.get("loss") is not None:
        loss = f"The training loss is {end['loss']:.4f} nats per token"
        sentences.append(f"{loss}; no validation loss was measured.")
    if nnz := end["sparsity"]["nnz_mean"]:
        width = run.recipe.model.intermediate_size
        zeros = f"{mean(nnz):,.1f} of {width:,} neurons are active for a token"
        sentences.append(f"{zeros}: {1 - mean(nnz) / width:.1%} of the activations are zero.")
    throughputs = [r["tokens_per_second"] for r in run.train if r.get("tokens_per_second")]
    if throughputs:
        sparse = (end.get("kernels") or {}).get("sparse", [])
        kernels = f"; {sum(sparse)} of {len(sparse)} layers on sparse kernels" if sparse else ""
        sentences.append(f"{statistics.median(throughputs):,.0f} tokens/s{kernels}.")
    return sentences + [f"Odd: {text}." for text in _odd(run)]


def _odd(run: RunData) -> Iterator[str]:
    end, losses = run.train[-1], [record["loss"] for record in run.validation]
    if losses and losses[-1] > (1 + RISEN) * min(losses):
        yield f"the validation loss has risen from {min(losses):.4f}"
    if end.get("skipped_steps"):
        yield f"{end['skipped_steps']} steps were skipped, as not finite or as spikes"
    if abs(off := end.get("target_error") or 0.0) > OFF_TARGET:
        yield f"the non-zeros are {against_target(off)}"
    dead = end["sparsity"]["dead_fraction"]
    if dead and mean(dead) > MANY_DEAD:
        yield f"{mean(dead):.0%} of the neurons are silent"
    if lost := (end.get("kernels") or {}).get("overflows"):
        yield f"{lost:,} patterns of the last step overflowed, and were computed again"
    outcomes = [session_end["how"] for session_end in run.session_ends.values()]
    for outcome in dict.fromkeys(
        outcome for outcome in outcomes if outcome.startswith(("failed", "killed"))
    ):
        yield f"a process was {outcome}" if outcome == "killed" else f"a process {outcome}"


def _verdict_section(run: RunData, several: bool) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict(run))
    head = f"In short: {run.label}" if several else "In short"
    return f"<section><h2>{escape(head)}</h2><ul>{sentences}</ul>{_sample(run.sample)}</section>"


def _sample(sample: Sample | None) -> str:
    if sample is None:
        return ""
    head = f"What the model writes by itself after step {sample.step:,}:"
    return f"<p>{head}</p><pre class='text'>{escape(str(sample))}</pre>"


def json_for_script(content: Any) -> str:
    """JSON that can neither end the ``<script>`` element around it nor open a comment there."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sweep_section(content: str, num_runs: int) -> str:
    head = f"<h2 id='head-sweep'>The sweep: {num_runs} runs</h2>"
    return f"<section aria-labelledby='head-sweep'>\n{head}\n{content}\n</section>"


def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
