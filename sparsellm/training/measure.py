"""What is measured after a step, once its checkpoint is saved: held-out loss and benchmarks.

A run that is killed here, or asked to stop, finds out when it resumes which records are missing.
Benchmarks are those of `sparsellm eval`, of the model in memory, without a checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.device import default_dtype, place
from sparsellm.evaluate.evaluator import Evaluator
from sparsellm.evaluate.scores import table, to_record
from sparsellm.evaluate.suite import load_suite, require_lm_eval, write_tasks
from sparsellm.model import HFModel, build_zero_model
from sparsellm.processes.distributed import FailedTogether, Interrupted, agree, any_rank, cause_of
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import Recipe
from sparsellm.recipe_sections import EvaluationConfig
from sparsellm.runs import state
from sparsellm.runs.metrics_log import MetricsLog
from sparsellm.runs.records import METRICS_FILE, FailureRecord, ValidationRecord, read_lines
from sparsellm.training.run import Run
from sparsellm.training.schedule import Due


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


def check_evaluation(recipe: Recipe) -> None:
    """Checks, before anything slow happens, that everything the recipe's benchmarks need is
    present.

    Data sets of the hub are looked up later, but also before the first step.

    Raises:
        ValueError: lm-eval, a task's file or its rows are missing; the message has the remedy.
    """
    config = recipe.evaluation
    if not config.every_steps:
        return
    with _with_remedy(config), tempfile.TemporaryDirectory(prefix="sparsellm-eval-") as folder:
        require_lm_eval()
        suite = load_suite()
        write_tasks(suite, list(suite.tasks), _data_dir(config), Path(folder))


def _data_dir(config: EvaluationConfig) -> Path | None:
    return Path(config.data_dir) if config.data_dir else None


@contextmanager
def _with_remedy(config: EvaluationConfig) -> Iterator[None]:
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{error}. The recipe runs benchmarks while it trains (evaluation.every_steps "
            f"{config.every_steps}); --set evaluation.every_steps=0 trains without them"
        ) from error


class PeriodicEvaluation:
    """The suite, ready for a run's model; every rank builds one and calls it at the same steps.

    Tasks are loaded here, so that missing rows are found before the first step. Each evaluation
    works on a copy of the weights, whole on every rank in the type that `sparsellm eval` uses, and
    freed afterwards: scores equal those of the checkpoint of that step, ranks need not run equally
    many batches under FSDP2, and nothing of the training model (compiled blocks, mode, shards,
    random state) is touched. It costs 2 bytes a parameter on a GPU.

    Raises:
        ValueError: as `Evaluator`.
    """

    def __init__(self, run: Run, stop: StopRequest) -> None:
        config = run.recipe.evaluation
        with _with_remedy(config):
            self._evaluation = Evaluator(
                data_dir=_data_dir(config),
                limit=config.limit,
                batch_size=config.batch_size,
                accelerator=run.accelerator,
            )
        self._tokenizer = load_tokenizer(run.recipe.data.tokenizer)
        self._agreement = _Agreement(stop, run.accelerator.device)

    def evaluate(self, run: Run, log: MetricsLog | None) -> None:
        """Scores the present model; prints the scores and writes them to the main rank's log.

        Raises:
            FailedTogether: some rank failed.
            Interrupted: some rank was asked to stop.
        """
        error, scores = None, None
        context_length = run.recipe.model.context_length
        try:
            model = _copy_model(run, self._tokenizer.eot_id)
            scores = self._evaluation.run(model, self._tokenizer, context_length, self._agreement)
        except (FailedTogether, Interrupted):
            raise
        except Exception as met:
            error = met.with_traceback(None)  # which holds the copy of the model
        # All ranks agree once more after scoring; or a rank that failed earlier joins those that
        # are still scoring.
        self._agreement.agree(error)
        if scores is None:
            return
        text = table(scores, self._evaluation.suite)
        run.accelerator.print(f"step {run.step} | evaluation (kernels: dense)\n{text}")
        if log is not None:
            log.write(to_record(scores, run.step, run.tokens))


@dataclass(frozen=True)
class _Agreement:
    """See `sparsellm.evaluate.lm.Agreement`."""

    stop: StopRequest
    device: torch.device

    def interrupted(self) -> bool:
        return self.stop.received is not None

    def agree(self, error: Exception | None) -> None:
        agree(error, self.interrupted(), self.device)


def _copy_model(run: Run, eot_id: int) -> HFModel:
    device = run.accelerator.device
    weights = state.gather_model(run.model)
    with device:
        model = build_zero_model(run.recipe, eot_id)
    state.restore_model(model, weights)
    return place(model, device, default_dtype(device))
