"""What is measured after a step, once its checkpoint is saved: validation loss and benchmarks.

A run that is killed here, or asked to stop, finds out when it resumes which records are missing.
Benchmarks are those of `sparsellm eval`, of the model in memory, without a checkpoint.
"""

from sparsellm.device import default_dtype, place
from sparsellm.evaluate.evaluator import Evaluator
from sparsellm.evaluate.in_training import data_dir, with_remedy
from sparsellm.evaluate.scores import table, to_record
from sparsellm.model import HFModel, build_zero_model
from sparsellm.processes.distributed import FailedTogether, Interrupted, agree, cause_of
from sparsellm.processes.signals import StopRequest
from sparsellm.runs import state
from sparsellm.runs.huggingface.hf_tokenizer import stock_tokenizer
from sparsellm.runs.telemetry.records import (
    METRICS_FILE,
    FailureRecord,
    ValidationRecord,
    read_lines,
)
from sparsellm.sparsity.over_ranks import any_rank
from sparsellm.training.optimization.schedule import measurements_due
from sparsellm.training.run import Run
from sparsellm.waiting import rewrite, warn


class Measurements:
    """The measurements of a run; every rank builds one and calls it at the same steps.

    The benchmarks' tasks are loaded here, so that missing rows are found before the first step.

    Args:
        run: of this rank.
        stop: ends a measurement, on all ranks.

    Raises:
        ValueError: as `Evaluator`.
    """

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._evaluator: Evaluator | None = None
        config = run.recipe.evaluation
        if config.every_steps:
            with with_remedy(config):
                self._evaluator = Evaluator(
                    data_dir=data_dir(config),
                    limit=config.limit,
                    batch_size=config.batch_size,
                    accelerator=run.accelerator,
                )
            self._tokenizer = stock_tokenizer(run.recipe.data.tokenizer, split_special_tokens=True)

    def missing(self) -> list[str]:
        """What was due after the step that the run resumed from, and has no record."""
        run, done = self._run, set[str]()
        pending = measurements_due(run.recipe, run.step)
        if pending and run.accelerator.is_main_process:
            for _, record in read_lines(run.recipe.run_path / METRICS_FILE):
                if record is not None and record.step == run.step:
                    done.add(record.what if isinstance(record, FailureRecord) else record.kind)
        # The main rank's file decides for all ranks.
        return [kind for kind in pending if not any_rank(kind in done, run.accelerator.device)]

    def measure(self, pending: list[str]) -> bool:
        """Measures what is due, prints and logs it; False if some rank was asked to stop.

        Raises:
            Exception: a measurement failed, and the recipe's ``on_error`` is ``stop``.
        """
        try:
            for kind in pending:
                self._attempt(kind)
        except Interrupted:
            return False
        return True

    def _attempt(self, kind: str) -> None:
        run = self._run
        run.activity.begin(kind, run.step)
        if run.accelerator.is_main_process:
            rewrite(f"step {run.step} | {kind} …")
        try:
            {"validation": self._validate, "evaluation": self._evaluate}[kind]()
        except FailedTogether as failure:
            if getattr(run.recipe, kind).on_error == "stop":
                raise cause_of(failure) from None
            met = failure.error
            text = f"{type(met).__name__}: {met}" if met else "on another rank, which has said why"
            if failure.speaks:
                where = f"step {run.step}: the {kind}"
                warn(f"{where} failed ({text}); training continues ({kind}.on_error)")
            run.write(FailureRecord(run.step, run.tokens, kind, text))

    def _validate(self) -> None:
        run = self._run
        if not run.validation:  # which was said when the run began
            run.write(FailureRecord(run.step, run.tokens, "validation", "no held-out text"))
            return
        losses = {
            name: held_out.loss(run.objective, run.accelerator, self.interrupted)
            for name, held_out in run.validation.items()
        }
        num_targets = sum(count for _, count in losses.values())
        loss = sum(mean * count for mean, count in losses.values()) / num_targets
        by_corpus = {name: mean for name, (mean, _) in losses.items()} if len(losses) > 1 else {}
        parts = "".join(f" | {name} {mean:.4f}" for name, mean in by_corpus.items())
        run.accelerator.print(
            f"step {run.step} | validation loss {loss:.4f} ({num_targets:,} tokens){parts}"
        )
        run.write(ValidationRecord(run.step, run.tokens, loss, num_targets, by_corpus))

    def _evaluate(self) -> None:
        """Scores a copy of the weights, whole on every rank in the type of `sparsellm eval`.

        So scores equal those of the step's checkpoint, ranks need not run equally many batches
        under FSDP2, and nothing of the training model (compiled blocks, mode, shards, random state)
        is touched. It costs 2 bytes per parameter on a GPU, until it is freed.
        """
        run, evaluator = self._run, self._evaluator
        assert evaluator is not None
        error, scores = None, None
        try:
            model = _copy_model(run, self._tokenizer.eos_token_id)
            scores = evaluator.run(model, self._tokenizer, self)
        except (FailedTogether, Interrupted):
            raise
        except Exception as met:
            error = met.with_traceback(None)  # which holds the copy of the model
        # All ranks agree once more after scoring; or a rank that failed earlier joins those that
        # are still scoring.
        self.agree(error)
        if scores is not None:
            text = table(scores, evaluator.suite)
            run.accelerator.print(f"step {run.step} | evaluation (kernels: dense)\n{text}")
            run.write(to_record(scores, run.step, run.tokens))

    # `sparsellm.evaluate.lm.Agreement`, for the ranks that score

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop.received is not None

    def agree(self, error: Exception | None) -> None:
        """Ends the measurement on all ranks if one has an error or was asked to stop."""
        agree(error, self.interrupted(), self._run.accelerator.device)


def _copy_model(run: Run, eot_id: int) -> HFModel:
    device = run.accelerator.device
    weights = state.gather_model(run.model)
    with device:
        model = build_zero_model(run.recipe, eot_id)
    state.restore_model(model, weights)
    return place(model, device, default_dtype(device))
