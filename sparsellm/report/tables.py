"""The report's tables as HTML; every text from a run is escaped."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import active_parameters, count_parameters
from sparsellm.recipe.keys import flatten
from sparsellm.report.collect import RunData
from sparsellm.runs.huggingface.hf_files import with_tokenizer_at_hand
from sparsellm.runs.telemetry.metrics import duration, mean
from sparsellm.runs.telemetry.records import l1_text

_NOT_COMPARED = ("name", "description", "logging.run_dir")


def summary_table(runs: list[RunData]) -> str:
    """One row per quantity, one column per run."""
    rows: dict[str, Callable[[RunData], str]] = {
        "Parameters": lambda r: f"{count_parameters(_readable(r)).total:,}",
        "Active parameters, for a token": _active,
        "Layers × neurons": lambda r: (
            f"{r.recipe.model.num_hidden_layers} × {r.recipe.model.intermediate_size:,}"
        ),
        "Corpus": lambda r: r.recipe.data.corpus_name,
        "L1 coefficient λ": lambda r: l1_text(r.recipe.sparsity, r.train[-1]),
        "Step": lambda r: f"{r.end['step']:,} of {r.recipe.train.steps:,}",
        "Training tokens": lambda r: f"{r.end['tokens']:,}",
        "Training loss, nats per token": lambda r: _over(r, "loss", lambda v: v[-1], "{:.4f}"),
        "Validation loss, nats per token": _validation,
        "Non-zeros per token, mean over layers": _nnz,
        "Dead neurons": lambda r: (
            f"{mean(_last(r)['dead_fraction']):.1%}" if _last(r)["dead_fraction"] else "–"
        ),
        "Tokens per second, median": lambda r: _over(
            r, "tokens_per_second", statistics.median, "{:,.0f}"
        ),
        "FFN kernels, format, token sorting": lambda r: (
            f"{r.recipe.ffn.kernels}, {r.recipe.ffn.format}, {r.recipe.runtime.token_order}"
        ),
        "Peak memory of rank 0": lambda r: _over(r, "memory_gib", max, "{:.2f} GiB"),
        "Wall time of its processes": lambda r: duration(r.seconds),
        "Processes, and how they ended": _processes,
        "Ranks and device": lambda r: _each(f"{s['ranks']} × {s['device']}" for s in r.sessions),
        "Commit": lambda r: _each(s["commit"] for s in r.sessions),
        "First weights": _first_weights,
        "Goes on from": _parent,
        "Resumed": lambda r: ", ".join(f"before step {s:,}" for s in r.resumed_at) or "never",
        "Recipe changed": _recipe_changes,
    }
    body = [[name, *(value(run) for run in runs)] for name, value in rows.items()]
    return html_table("Summary of the runs", ["", *(run.label for run in runs)], body)


def _readable(run: RunData) -> Recipe:
    """Its recipe, also where the tokenizer, which decides the vocabulary, is gone."""
    return with_tokenizer_at_hand(run.recipe, run.path)


def _processes(run: RunData) -> str:
    ends = [run.session_ends.get(s["id"], {}).get("how", "no end recorded") for s in run.sessions]
    return _each(f"{ends.count(outcome)} {outcome}" for outcome in dict.fromkeys(ends))


def _first_weights(run: RunData) -> str:
    if (origin := run.first_weights) is None:
        return "random"
    # Of weights that sparsellm has not trained, the tokens are unknown.
    after = f" after {origin['tokens']:,} tokens, not counted above" if origin["tokens"] else ""
    return f"{origin['name']}{after}"


def _parent(run: RunData) -> str:
    parent = run.sessions[0].get("parent") if run.sessions else None
    return f"step {parent['step']:,} of {parent['name']}" if parent else "–"


def _recipe_changes(run: RunData) -> str:
    """What later processes changed in the recipe, where their steps were not computed again."""
    by_step: dict[int, list[str]] = {}
    for session in run.sessions:
        by_step = {step: changes for step, changes in by_step.items() if step < session["step"]}
        by_step[session["step"]] = session.get("changes", [])
    texts = [f"after step {step:,}: {', '.join(c)}" for step, c in by_step.items() if c]
    return "; ".join(texts) or "no"


def _each(values: Iterable[str]) -> str:
    """The distinct values, in order."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"


def difference_table(runs: list[RunData]) -> str:
    """The recipe keys that differ between the runs."""
    if len(runs) == 1:
        return "<p>One run, so there is nothing to compare; its whole recipe is below.</p>"
    flat = [flatten(run.recipe.model_dump(mode="json")) for run in runs]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    rows = []
    for key in keys:
        values = [_value(recipe.get(key)) for recipe in flat]
        if key not in _NOT_COMPARED and len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return "<p>The recipes differ only in name, description and folder.</p>"
    return html_table("Recipe keys that differ", ["Key", *(run.label for run in runs)], rows)


def recipes(runs: list[RunData]) -> str:
    """Each run's whole recipe, collapsed."""
    return "\n".join(
        _collapsed(f"Recipe of {run.label}", f"<pre>{escape(run.recipe.to_yaml())}</pre>")
        for run in runs
    )


def evaluation_table(runs: list[RunData]) -> str:
    """Scores of each run's newest evaluation."""
    scored = [(run, run.evaluations[-1]) for run in runs if run.evaluations]
    if not scored:
        return (
            "<p>No evaluation: the runs have no record of one, and no <code>eval*.json</code> "
            "lies beside their checkpoints.</p>"
        )
    keys = dict.fromkeys(key for _, evaluation in scored for key in evaluation.scores)
    rows = []
    for task, metric in keys:
        scores = [evaluation.scores.get((task, metric)) for _, evaluation in scored]
        rows.append([f"{task}, {metric}", *(s.text(metric) if s else "–" for s in scores)])
    means = [evaluation.mean for _, evaluation in scored]
    if any(means):
        rows.append(["mean of the suite", *(m.text("acc") if m else "–" for m in means)])
    steps = ["unknown" if e.step is None else f"{e.step:,}" for _, e in scored]
    labels = [f"{run.label}, step {step}" for (run, _), step in zip(scored, steps, strict=True)]
    head = ["Task, metric", *labels]
    notes = ["Accuracies in percent ± standard error; * enters the mean."]
    for run, evaluation in scored:
        if evaluation.caveat:
            notes.append(f"{run.label}: {evaluation.caveat}.")
    table = html_table("Benchmark scores, newest evaluation of each run", head, rows)
    return table + f"<p class='note'>{escape(' '.join(notes))}</p>"


def layer_tables(runs: list[RunData]) -> str:
    """Each run's layers at its last record, collapsed."""
    parts = []
    for run in runs:
        stats, width = _last(run), run.recipe.model.intermediate_size
        keys = ("nnz_mean", "nnz_p50", "nnz_p99", "nnz_max", "dead_fraction")
        formats = ("{:,.1f}", "{:,}", "{:,}", "{:,}", "{:.1%}")
        rows = []
        for layer, values in enumerate(zip(*(stats[key] for key in keys), strict=True)):
            mean, *rest = (form.format(v) for form, v in zip(formats, values, strict=True))
            rows.append([str(layer), mean, f"{values[0] / width:.2%}", *rest])
        head = ["Layer", "Mean", f"Of {width:,}", "Median", "99th percentile", "Maximum", "Dead"]
        title = f"Non-zeros per token by layer, {run.label}, step {run.train[-1]['step']:,}"
        parts.append(_collapsed(title, html_table(title, head, rows)))
    return "\n".join(parts)


def analysis_tables(runs: list[RunData]) -> str:
    """Results of `sparsellm analyze`: unions by layer, and the least and most active tokens."""
    parts = []
    for run in runs:
        if run.analysis is None:
            continue
        title = (
            f"Held-out text, {run.label}: {run.analysis['tokens']:,} tokens of "
            f"{run.analysis['corpus']}, step {run.analysis['step']:,}"
        )
        rows = [
            [
                str(number),
                f"{layer['nnz_mean']:,.1f}",
                f"{layer['nnz_p99']:,}",
                *(f"{layer['union'][tokens]:,.0f}" for tokens in ("64", "128", "256")),
                f"{layer['tile_max']:,}",
                f"{layer['hot_share']['256']:.1%}",
                f"{layer['never_fired_fraction']:.1%}",
            ]
            for number, layer in enumerate(run.analysis["layers"])
        ]
        head = ["Layer", "Non-zeros", "99th percentile", "Union of 64", "128", "256"]
        head += ["Most in a tile of 256", "Share of the 256 most active", "Never active"]
        ends = [
            [end, ", ".join(f"{t['text']!r} {t['nnz_mean']:.1f}" for t in ranked_tokens[:12])]
            for end, ranked_tokens in run.analysis["tokens_by_nnz"].items()
        ]
        tokens = html_table("Tokens with the fewest and the most non-zeros", ["", ""], ends)
        parts.append(_collapsed(title, html_table(title, head, rows) + tokens))
    return "\n".join(parts)


def _last(run: RunData) -> dict[str, Any]:
    return run.train[-1]["sparsity"]


def _over(run: RunData, key: str, of: Callable[[list[float]], float], text: str) -> str:
    """A figure over the records that have the value."""
    values = [record[key] for record in run.train if record.get(key) is not None]
    return text.format(of(values)) if values else "–"


def _validation(run: RunData) -> str:
    if not run.validation:
        return "–"
    last = run.validation[-1]
    return f"{last['loss']:.4f} (step\u00a0{last['step']:,})"


def _active(run: RunData) -> str:
    nnz = _last(run)["nnz_mean"]
    return f"{active_parameters(_readable(run), mean(nnz)):,}" if nnz else "–"


def _nnz(run: RunData) -> str:
    if not _last(run)["nnz_mean"]:
        return "–"
    nnz = mean(_last(run)["nnz_mean"])
    return f"{nnz:,.1f} ({nnz / run.recipe.model.intermediate_size:.2%})"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _collapsed(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with marked row and column headers; wide tables scroll in their own box."""
    columns = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in head)
    lines = [
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    return (
        f"<div class='table' tabindex='0' role='region' aria-label='{escape(caption)}'><table>"
        f"<caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
