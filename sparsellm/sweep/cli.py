"""``sparsellm sweep``."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.arguments import add_overrides, positive_int
from sparsellm.waiting import waiting
from sparsellm.words import counted

if TYPE_CHECKING:
    from sparsellm.sweep.plan import PlannedRun


def add_sweep_parser(commands: Any) -> None:
    """Adds ``sweep`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "sweep",
        help="train the runs of an experiment, several in parallel, and write one report",
        description="Trains every run of a sweep (recipes/sweeps/) and reports them together. The "
        "same command resumes: finished runs are skipped, others resume from their checkpoint.",
    )
    text = "a bundled sweep or a YAML file; without it, the bundled sweeps are listed"
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help=text)
    text = "parallel runs on each GPU (default: 1)"
    parser.add_argument("--jobs", type=positive_int, default=1, help=text)
    text = "GPU numbers such as 0 1 (default: the first)"
    parser.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help=text)
    text = "GPUs per run, with accelerate launch (default: 1)"
    parser.add_argument("--gpus-per-run", type=positive_int, default=1, metavar="N", help=text)
    text = "file of launch/ for runs on several GPUs (default: ddp8; fsdp2 for large models)"
    parser.add_argument("--config", default="ddp8", help=text)
    add_overrides(parser)
    text = "train only these runs; a name may contain wildcards, such as 'dense-*'"
    parser.add_argument("--only", nargs="+", default=["*"], metavar="RUN", help=text)
    text = "do not start further runs after this many seconds"
    parser.add_argument("--seconds", type=float, default=math.inf, help=text)
    parser.add_argument("--list", action="store_true", help="list the runs without training")
    parser.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> None:
    from sparsellm.sweep.plan import bundled_sweeps, load_plan

    if options.sweep in (None, "list"):
        sweeps = bundled_sweeps()
        width = max(map(len, sweeps))
        for name, description in sweeps.items():
            print(f"{name:{width}}  {description}")
        return
    plan = load_plan(options.sweep, options.overrides)
    chosen = plan.named(options.only)
    if options.list:
        print(_list(chosen))
        return
    from sparsellm.data.first_look import check_text

    # Runs mostly share their text, which is looked at once.
    texts = {}
    for recipe in (run.recipe for run in chosen):
        text = (recipe.data, recipe.model.context_length, recipe.validation.every_steps > 0)
        texts[str(text)] = text
    for text in texts.values():
        check_text(*text)
    from sparsellm.sweep.runner import run_sweep

    unfinished = run_sweep(plan, chosen, options)
    # Also where some runs are not finished: the others can be compared.
    if len(unfinished) < len(chosen):
        with waiting("writing the report"):
            from sparsellm.report.sweep_report import SUMMARY_FILE, write_sweep_report

            page = write_sweep_report(plan.folder)[0]
        print(_table(plan.folder / SUMMARY_FILE), f"report: {page}", sep="\n")
    if unfinished:
        verb = "is" if len(unfinished) == 1 else "are"
        raise ValueError(
            f"{len(unfinished)} of {counted(len(chosen), 'run')} {verb} not finished: "
            f"{', '.join(unfinished)}; the same command continues them"
        )


def _list(runs: "list[PlannedRun]") -> str:
    from sparsellm.sweep.folder import is_finished

    width = max(len(run.name) for run in runs)
    lines = [f"{'run':{width}} {'tokens':>14}  {'state':8}  settings"]
    for run in runs:
        tokens = run.recipe.train.steps * run.recipe.train.global_batch_tokens
        state = "finished" if is_finished(run) else "to do"
        start = [f"init_from={run.init_from}"] if run.init_from else []
        settings = " ".join([*start, *run.changes])
        lines.append(f"{run.name:{width}} {tokens:>14,}  {state:8}  {settings}".rstrip())
    return "\n".join(lines)


def _table(summary: Path) -> str:
    """A sweep's summary.json in lines for a terminal."""
    lines = [f"{'':28} {'active':>8} {'validation loss':>15} {'tokens/s':>10}"]
    for group in json.loads(summary.read_text(encoding="utf-8")):
        losses = group["held_out_losses"]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "–"
        throughput = group["tokens_per_second"]
        lines.append(f"{group['group']:28} {group['nnz']:>8.1f} {loss:>15} {throughput:>10,.0f}")
    return "\n".join(lines)
