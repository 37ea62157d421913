"""Evaluation during training: `sparsellm eval` of the model in memory, without a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsellm.data import load_tokenizer
from sparsellm.device import default_dtype, place
from sparsellm.evaluate.evaluator import Evaluator
from sparsellm.evaluate.scores import table, to_record
from sparsellm.evaluate.suite import load_suite, require_lm_eval, write_tasks
from sparsellm.model import HFModel, build_zero_model
from sparsellm.recipe import EvaluationConfig, Recipe
from sparsellm.runs import state
from sparsellm.runs.metrics_log import MetricsLog
from sparsellm.training.distributed import FailedTogether, Interrupted, agree
from sparsellm.training.run import Run
from sparsellm.training.signals import StopRequest


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
        # Of what comes after the scoring; or, where this rank did not come to it, the others'.
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
