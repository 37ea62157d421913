"""What is measured after a step, once its checkpoint is saved: held-out loss and benchmarks.

A run that is killed here, or asked to stop, finds out when it resumes which records are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sparsellm.runs.metrics_log import MetricsLog
from sparsellm.runs.records import METRICS_FILE, FailureRecord, ValidationRecord, read_lines
from sparsellm.training.distributed import FailedTogether, Interrupted, any_rank, cause_of
from sparsellm.training.evaluation import PeriodicEvaluation
from sparsellm.training.run import Run
from sparsellm.training.schedule import Due
from sparsellm.training.signals import StopRequest


def missing(run: Run) -> Due:
    """What was due after the step that the run resumed from and has no record in metrics.jsonl."""
    due, device = Due.after(run.recipe, run.step), run.accelerator.device
    done: set[str] = set()
    if due and run.accelerator.is_main_process:
        done = _measured(run)
    # The main rank's file decides, for all.
    return Due(
        validation=due.validation and not any_rank("validation" in done, device),
        evaluation=due.evaluation and not any_rank("evaluation" in done, device),
    )


def _measured(run: Run) -> set[str]:
    lines = read_lines(run.recipe.run_path / METRICS_FILE)
    of_step = [record for _, record in lines if record is not None and record.step == run.step]
    return {record.what if isinstance(record, FailureRecord) else record.kind for record in of_step}


def measure(
    run: Run,
    log: MetricsLog | None,
    stop: StopRequest,
    evaluator: PeriodicEvaluation | None,
    due: Due,
) -> bool:
    """Measures what is due, prints and logs it; False if some rank was asked to stop.

    Raises:
        Exception: a measurement failed, and the recipe's ``on_error`` is ``stop``.
    """
    recipe = run.recipe
    try:
        if due.validation:
            on_error = recipe.validation.on_error
            _attempt(run, log, "validation", on_error, lambda: _validate(run, log, stop))
        if due.evaluation:
            assert evaluator is not None
            on_error = recipe.evaluation.on_error
            _attempt(run, log, "evaluation", on_error, lambda: evaluator.evaluate(run, log))
    except Interrupted:
        return False
    return True


def _attempt(
    run: Run, log: MetricsLog | None, what: str, on_error: str, action: Callable[[], None]
) -> None:
    run.activity.begin(what, run.step)
    try:
        action()
    except FailedTogether as failure:
        if on_error == "stop":
            raise cause_of(failure) from None
        met = failure.error
        text = f"{type(met).__name__}: {met}" if met else "on another rank, which has said why"
        if failure.speaks:
            print(
                f"warning: step {run.step}: the {what} failed ({text}); training goes on "
                f"({what}.on_error)",
                file=sys.stderr,
                flush=True,
            )
        if log is not None:
            log.write(FailureRecord(run.step, run.tokens, what, text))


def _validate(run: Run, log: MetricsLog | None, stop: StopRequest) -> None:
    found = {
        name: held_out.loss(run.objective, run.accelerator, lambda: stop.received is not None)
        for name, held_out in run.validation.items()
    }
    num_targets = sum(count for _, count in found.values())
    loss = sum(mean * count for mean, count in found.values()) / num_targets
    by_corpus = {name: mean for name, (mean, _) in found.items()} if len(found) > 1 else {}
    parts = "".join(f" | {name} {mean:.4f}" for name, mean in by_corpus.items())
    run.accelerator.print(
        f"step {run.step} | validation loss {loss:.4f} ({num_targets:,} tokens){parts}"
    )
    if log is not None:
        log.write(ValidationRecord(run.step, run.tokens, loss, num_targets, by_corpus))
