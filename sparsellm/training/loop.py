"""The training loop, to be read from top to bottom: `train` is a run from its beginning to its end,
`_train_steps` is the loop, and `step.train_step` is the step that it repeats.

`accelerate launch -m sparsellm train …` starts one process per GPU. Each process holds a `Run` and
performs the same steps. The recipe alone decides what is computed (recipe/); how the ranks divide
the work makes no difference (objective.py).
"""

from pathlib import Path

import torch

from sparsellm.data.loader import Bookmark
from sparsellm.evaluate.in_training import check_evaluation
from sparsellm.processes.banner import Machine, unused_gpus
from sparsellm.processes.consensus import agreed_checkpoint, compare_environments, locked
from sparsellm.processes.distributed import FailedTogether, RankActivity, cause_of
from sparsellm.processes.peers import Peers
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import Recipe
from sparsellm.runs.checkpoint import latest
from sparsellm.runs.files import RECIPE_FILE, free_path, write_atomically
from sparsellm.runs.history import set_records_aside, set_results_aside
from sparsellm.runs.lock import PRESENCE_FILE, RunLock
from sparsellm.runs.telemetry.dashboard import check_wandb
from sparsellm.runs.telemetry.metrics_log import MetricsLog
from sparsellm.runs.telemetry.records import FailureRecord
from sparsellm.runs.telemetry.session import this_session
from sparsellm.sparsity.over_ranks import any_rank
from sparsellm.training import rehearsal
from sparsellm.training.measure import Measurements
from sparsellm.training.meter import Meter, progress_line
from sparsellm.training.nonfinite import check_finite
from sparsellm.training.optimization.schedule import (
    measurements_due,
    next_may_launch,
    peak_warning,
    saves_after,
)
from sparsellm.training.resume.run_state import begin_save, first_state
from sparsellm.training.run import Run, build_accelerator, build_run, close_run
from sparsellm.training.step import StepTotals, train_step
from sparsellm.training.teacher import load_teacher
from sparsellm.waiting import rewrite, waiting
from sparsellm.words import counted


def train(
    recipe: Recipe,
    stop: StopRequest,
    resume_from: Path | None = None,
    fresh: bool = False,
    init_from: Path | None = None,
) -> None:
    """Trains to `recipe.train.steps`. A run that has a checkpoint of its own resumes from it.

    Args:
        recipe: what is trained.
        stop: a context that has been entered; it notices signals that ask the run to stop.
        resume_from: a checkpoint from which a new run goes on, see `history.start_of`.
        fresh: begins at step 0; an earlier run of the same name is moved aside, not deleted.
        init_from: the weights of step 0.

    Raises:
        ValueError, FileNotFoundError: a recipe, corpus or checkpoint that cannot be used.
        CheckpointError: a checkpoint could not be written.
        FloatingPointError: loss or gradients became NaN or infinite.
    """
    check_evaluation(recipe)
    torch.set_float32_matmul_precision("high")
    accelerator, activity = build_accelerator(recipe), RankActivity()
    if warning := unused_gpus(Machine.present(), accelerator.device.type, torch.__version__):
        accelerator.print(warning)
    if warning := peak_warning(recipe):
        accelerator.print(f"warning: {warning}")
    peers = Peers(accelerator, stop, activity, recipe.runtime.timeout_minutes)
    with peers, locked(recipe.run_path, accelerator) as lock:
        # Ranks agree on versions and on the checkpoint before anything is read.
        compare_environments(recipe, accelerator)
        resume_from = agreed_checkpoint(recipe, accelerator, resume_from, fresh)
        with waiting("reading data, building the model", accelerator.print):
            from_scratch = resume_from is None and init_from is None
            run = build_run(recipe, accelerator, activity, random_weights=from_scratch)
        try:
            # A run that was killed after its last step still makes the measurements of that step.
            measurements = _prepare(run, stop, resume_from, init_from)
            missing = measurements.missing()
            if run.step < recipe.train.steps or missing:
                _compile(run)
                if fresh:
                    _move_aside(run, lock)
                _begin_records(run)
                finished = _train_steps(run, stop, measurements, missing)
                run.say_saved()
                reason = stop.received or "signal on another rank"
                _close_log(run, "finished" if finished else f"stopped ({reason})")
                _say_end(run, "" if finished else reason, fresh=fresh)
            else:
                _say_nothing_to_do(run)
        except BaseException as error:
            _close_after(run, error)
            raise
    close_run(run)


def _prepare(
    run: Run, stop: StopRequest, resume_from: Path | None, init_from: Path | None
) -> Measurements:
    """Loads the weights and state that the run begins with, and finds a micro-batch that fits."""
    if run.accelerator.is_main_process:
        check_wandb(run.recipe)
    measurements = Measurements(run, stop)
    run.teacher = load_teacher(run.recipe, run.accelerator.device, resume_from, init_from)
    with waiting(_first_passes(run), run.accelerator.print):
        rehearsal.fit_initial_size(run)
    first_state(run, resume_from, init_from)
    if resume_from is not None:
        rehearsal.restore_saved_size(run)
    return measurements


def _compile(run: Run) -> None:
    """Compiles the model while the first micro-batches are read."""
    if run.step < run.recipe.train.steps:
        run.loader.start()
    with waiting(_first_passes(run), run.accelerator.print):
        rehearsal.warm_up(run)


def _train_steps(
    run: Run, stop: StopRequest, measurements: Measurements, missing: list[str]
) -> bool:
    """The loop: trains to the last step. Returns False if the run was asked to stop earlier.

    ``missing``: measurements of the step that it resumes from, which an earlier process missed.
    """
    recipe = run.recipe
    run.saved_step = run.step  # of the checkpoint that it resumed from; step 0 is not worth saving
    if run.step:
        stop.begin()
    if not measurements.measure(missing):
        return False
    meter = Meter(run)
    while run.step < recipe.train.steps:
        if run.accelerator.is_main_process:
            rewrite(f"step {run.step}/{recipe.train.steps} …")  # until the next line
        totals = _take_step(run, stop)
        stop.begin()
        rehearsal.double_if_it_fits(run, totals.reading.kernels.sparse)
        _record(run, meter, totals)
        meter.pause()
        pending = measurements_due(recipe, run.step)
        stopped = _save_and_measure(run, stop, measurements, pending, stopped=totals.reading.stop)
        meter.resume()
        if stopped and (pending or run.step < recipe.train.steps):
            return False
    return True


def _take_step(run: Run, stop: StopRequest) -> StepTotals:
    """One step; if it fails, the state before it is saved."""
    while True:
        before = run.data_position
        try:
            return train_step(run, stop, launch_next=next_may_launch(run.recipe, run.step + 1))
        except Exception as error:
            run.queued = None
            if not (isinstance(error, torch.OutOfMemoryError) and rehearsal.may_shrink(run)):
                _save_what_is_whole(run, error, before)
                raise cause_of(error) from None
        # Outside the handler: only here are the frames of that step, and their tensors, gone.
        rehearsal.shrink_after_failure(run, before)


def _record(run: Run, meter: Meter, totals: StepTotals) -> None:
    """Prints and logs a step's numbers if they are due, and why a step was skipped."""
    if totals.skipped:
        run.accelerator.print(
            f"step {run.step} was skipped: {totals.skipped.why} ({run.skips.total} in all; "
            f"{totals.skipped.key})"
        )
        run.write(FailureRecord(run.step, run.tokens, "step", totals.skipped.why))
    elif totals.reading.sparsity is not None:
        record = meter.record(run, totals)
        run.accelerator.print(progress_line(record, run.recipe))
        run.write(record)
    for name, epoch in zip(run.loader.corpus_names, totals.reading.epochs_C, strict=True):
        if epoch and name not in run.repeating:
            run.repeating.add(name)
            run.accelerator.print(
                f"step {run.step}: text of corpus {name} repeats from here on: a part of it has "
                "been read to its end"
            )
    if run.target and (warning := run.target.new_warning()):
        run.accelerator.print(f"warning: step {run.step}: {warning}")
        run.write(FailureRecord(run.step, run.tokens, "target", warning))


def _save_and_measure(
    run: Run, stop: StopRequest, measurements: Measurements, pending: list[str], *, stopped: bool
) -> bool:
    """Saves and measures if a step is due for it; returns whether the run is to stop now."""
    saves = run.recipe.checkpoint.every_steps > 0
    if saves_after(run.recipe, run.step) or (saves and stopped):
        _save(run)
    elif run.saver.finished:
        run.say_saved()
    if not stopped:
        stopped = not measurements.measure(pending)
    if pending or run.saved_step == run.step:  # it may have taken minutes: was there a signal?
        stopped = any_rank(stopped or stop.received is not None, run.accelerator.device)
    if stopped and saves and run.saved_step != run.step:
        _save(run)
    return stopped


def _save(run: Run) -> None:
    """Begins a save, after waiting for the previous one and reporting it."""
    run.activity.begin("saving", run.step)
    check_finite(run)
    if run.log is not None:
        run.log.sync()
    run.say_saved()
    begin_save(run)
    run.saved_step = run.step


def _save_what_is_whole(run: Run, error: Exception, before: Bookmark) -> None:
    """Saves the state before a failed step, if all ranks are alive and still hold that state."""
    if not run.recipe.checkpoint.every_steps or not run.between_steps or run.step <= run.saved_step:
        return
    if isinstance(error, FloatingPointError):  # it would fail again with these weights
        return
    if isinstance(error, FailedTogether) or run.accelerator.num_processes == 1:
        run.loader.go_back(before)
        _save(run)
        run.say_saved()


def _begin_records(run: Run) -> None:
    """Prepares the run's folder before the first step, and opens the log there."""
    accelerator, path = run.accelerator, run.recipe.run_path
    if not accelerator.is_main_process:
        return
    if latest(run.checkpoints) is None and (aside := set_records_aside(path)):
        accelerator.print(
            f"{path} has records and no checkpoint: training begins at step {run.step}, and the "
            f"records are now {aside}"
        )
    if aside := set_results_aside(path, run.step):
        accelerator.print(
            f"scores, analyses and text of earlier checkpoints after step {run.step} are now in "
            f"{aside}: these steps are trained again"
        )
    write_atomically(path / RECIPE_FILE, run.recipe.to_yaml())
    session = this_session(
        run.step,
        run.tokens,
        accelerator.num_processes,
        accelerator.device,
        parent=run.parent,
        init_from=run.origin,
        changes=run.changes,
        texts=run.loader.text_ids,
    )
    run.log = MetricsLog(run.recipe, run.step, session)


def _move_aside(run: Run, lock: RunLock) -> None:
    path = run.recipe.run_path
    if run.accelerator.is_main_process and any(p.name != PRESENCE_FILE for p in path.iterdir()):
        aside = free_path(path)
        path.rename(aside)
        lock.moved(aside)
        run.accelerator.print(f"the earlier run is now {aside}")
    run.accelerator.wait_for_everyone()


def _first_passes(run: Run) -> str:
    compiles = run.recipe.runtime.compile
    return "compiling the model" if compiles else "first forward and backward pass"


def _say_nothing_to_do(run: Run) -> None:
    run.accelerator.print(
        f"nothing to do: this run has done {run.step} steps of train.steps "
        f"{run.recipe.train.steps}; raise train.steps, or start over with --fresh or "
        "--set name=NEW"
    )


def _say_end(run: Run, stopped: str, *, fresh: bool) -> None:
    """Says how the run ended.

    Args:
        run: after its last step.
        stopped: why, if it was asked to stop.
        fresh: the command had ``--fresh``, with which it would start over again.
    """
    recipe, say = run.recipe, run.accelerator.print
    saves = recipe.checkpoint.every_steps > 0
    if stopped:
        resumes = "without --fresh the same command" if fresh else "the same command"
        then = f"{resumes} resumes here" if saves else "nothing was saved"
        say(f"stopped after step {run.step} ({stopped}); {then}")
        return
    skipped = f" ({run.skips.total} of them skipped)" if run.skips.total else ""
    say(f"done: {counted(run.step, 'step')}{skipped}, {run.tokens:,} tokens")
    if run.target and (warning := run.target.final_warning()):
        say(f"warning: {warning}")
    files = "recipe.yaml, metrics.jsonl, checkpoints/" if saves else "recipe.yaml, metrics.jsonl"
    say(f"files: {recipe.run_path}/ ({files})")
    say(f"charts: sparsellm report {recipe.run_path}")


def _close_log(run: Run, outcome: str) -> None:
    """``outcome``: in a few words, how the run ended."""
    log, run.log = run.log, None
    if log is not None:
        log.close(outcome)


def _close_after(run: Run, error: BaseException) -> None:
    """Closes what must not wait for other ranks, which may be gone."""
    if not isinstance(error, Exception):
        _close_log(run, "interrupted")
        return
    try:
        _close_log(run, f"failed: {type(error).__name__}: {error}"[:500])
    finally:
        if run.accelerator.num_processes == 1:
            close_run(run)
        run.loader.close()
