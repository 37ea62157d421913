"""What happens before the first step: compilation, the run's state, and its folder."""

from __future__ import annotations

import itertools
from pathlib import Path

from sparsellm.runs.files import write_atomically
from sparsellm.runs.history import begin_branch
from sparsellm.runs.lock import RunLock
from sparsellm.runs.presence import PRESENCE_FILE
from sparsellm.training.distributed import clear_gradients
from sparsellm.training.fit import fit_again
from sparsellm.training.kernel_policy import each_path
from sparsellm.training.run import Run
from sparsellm.training.run_state import initialise_run, restore_run
from sparsellm.training.step import accumulation, rehearse


def first_state(run: Run, resume_from: Path | None, init_from: Path | None) -> None:
    """Restores or initialises the run, without changing its folder."""
    say = run.accelerator.print
    run.activity.begin("loading", run.step)
    if resume_from is not None:
        say(f"resuming from {resume_from}")
        for note in restore_run(run, resume_from):
            say(f"  {note}")
        fit_again(run)
    elif init_from is not None:
        say("\n  ".join(initialise_run(run, init_from)))


def move_aside(run: Run, lock: RunLock) -> None:
    path = run.recipe.run_path
    if run.accelerator.is_main_process and any(p.name != PRESENCE_FILE for p in path.iterdir()):
        aside = next(p for i in itertools.count(1) if not (p := Path(f"{path}.{i}")).exists())
        path.rename(aside)
        lock.moved(aside, run.accelerator.print)
        run.accelerator.print(f"the earlier run is now {aside}")
    run.accelerator.wait_for_everyone()


def begin_records(run: Run, resumed: Path | None) -> None:
    """Prepares the run's folder for this branch of the run, before the first step."""
    recipe = run.recipe
    if run.accelerator.is_main_process:
        recipe.run_path.mkdir(parents=True, exist_ok=True)
        for note in begin_branch(recipe.run_path, resumed):
            run.accelerator.print(note)
        write_atomically(recipe.run_path / "recipe.yaml", recipe.to_yaml())


def warm_up(run: Run) -> None:
    """Forward and backward of micro-batches whose gradients are discarded, one or two per path.

    Compilation is then finished before throughput is measured. Also, DDP rebuilds its gradient
    buckets after its first backward pass: afterwards every step sums over ranks in the same order,
    and a resumed run equals an uninterrupted one to the last bit.
    """
    run.activity.begin("compiling", run.step)
    several = run.rounds > 1
    for _ in each_path(run.ffns):
        # Of several micro-batches that share weights the last one is a graph of its own: its
        # gradients go through autograd. Without sharing they are all alike.
        sparse = any(ffn.path == "sparse" for ffn in run.ffns)
        shares = sparse or run.recipe.runtime.weight_gradients == "fused"
        for _ in accumulation(run, 2 if several and shares else 1):
            rehearse(run)
    clear_gradients(run.optimizer, run.objective)
