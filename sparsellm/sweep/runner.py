"""Runs a plan: worker processes take one run after another; finished runs are skipped.

A worker trains its runs in one process, one after another, so that imports and compilation happen
only once. If a run needs several GPUs, the worker starts it by `accelerate launch`. A run's folder
holds all of its state, so the same command resumes the sweep. Folders whose checkpoints were
deleted still count as finished.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sparsellm.evaluate.in_training import check_evaluation
from sparsellm.processes.launched import launch_config
from sparsellm.recipe import Recipe
from sparsellm.runs.telemetry.dashboard import check_wandb
from sparsellm.runs.telemetry.records import of_kind, read_metrics
from sparsellm.sweep.folder import begin, check_sources, check_texts, is_finished
from sparsellm.sweep.plan import PlannedRun, SweepPlan
from sparsellm.sweep.worker import (
    LOG_FILE,
    STOP_SIGNALS,
    begin_worker,
    train_launched,
    train_one,
    work,
)
from sparsellm.waiting import on_terminal, rewrite

# Seconds between two looks at what the runs print: few after a start, then more. On a terminal
# a line is rewritten in place each time, so it can always be soon.
FIRST_PAUSE, LONGEST_PAUSE, ON_TERMINAL = 3.0, 48.0, 1.0
say = partial(print, flush=True)  # so that a log file has it too: a run may take hours


def run_sweep(
    plan: SweepPlan, chosen: Sequence[PlannedRun], options: argparse.Namespace
) -> list[str]:
    """Trains the chosen runs; returns the names of those that are not finished then.

    Says when a run starts and when it ends.

    Args:
        plan: the sweep.
        chosen: those of its runs that are to be trained; finished ones are skipped.
        options: ``jobs``, ``gpus``, ``gpus_per_run``, ``config`` and ``seconds``, as
            `cli.add_sweep_parser` describes them.

    Raises:
        ValueError: the folder of a run, or of another of its group, has a run of another recipe;
            the GPUs cannot be divided this way; a requirement of the benchmarks is missing.
    """
    places = _places(options.gpus, options.gpus_per_run)
    _check_requirements(chosen, options)
    # Whatever is wrong with the plan is said before the first run starts.
    groups = {run.group for run in chosen}  # the report averages the runs of one
    needed = {run.init_from for run in chosen} | {r.name for r in plan.runs if r.group in groups}
    done = {run.name for run in plan.runs if run.name in needed and is_finished(run)}
    check_sources(chosen, done)
    check_texts(plan, chosen, done)
    begin(plan)
    for name in sorted(done):
        say(f"{name}: finished before")
    sweep = _Sweep([run for run in chosen if run.name not in done], done, options)
    with _pool(options.jobs, places, len(sweep.todo)) as (pool, workers):
        sweep.train(pool, workers)
    for run in sweep.todo:
        why = f"{run.init_from} is not finished"
        if sweep.timed_out:
            why = "the time limit has passed"
        say(f"{_at(sweep.start_time)} | {run.name}: not started: {why}")
    return [run.name for run in chosen if run.name not in done]


@dataclass
class _Sweep:
    """The runs of a sweep that have not ended, while they are trained."""

    todo: list[PlannedRun]  # not started
    done: set[str]  # names of finished runs
    options: argparse.Namespace
    running: dict[Future[float], PlannedRun] = field(default_factory=dict)
    start_time: float = field(default_factory=time.monotonic)
    timed_out: bool = False

    def train(self, pool: ProcessPoolExecutor, workers: int) -> None:
        """Starts runs as workers become free, until none is left that can be started."""
        in_place = on_terminal() and sys.stdout.isatty()
        pause = ON_TERMINAL if in_place else FIRST_PAUSE
        while self.todo or self.running:
            self._start_ready(pool, workers)
            if not self.running:
                break
            finished, _ = wait(self.running, pause, return_when=FIRST_COMPLETED)
            pause = FIRST_PAUSE if finished else min(2 * pause, LONGEST_PAUSE)
            if in_place:
                pause = ON_TERMINAL
                turn = int(time.monotonic()) % len(self.running)
                shown = [list(self.running.values())[turn]]
                rewrite("" if finished else _progress(self.start_time, shown))
            elif not finished:
                say(_progress(self.start_time, self.running.values()))
            for future in finished:
                self._end(future)

    def _start_ready(self, pool: ProcessPoolExecutor, workers: int) -> None:
        """Submits the runs whose source is finished, unless time is up."""
        self.timed_out = time.monotonic() - self.start_time > self.options.seconds
        job: Callable[[Recipe, Path | None], float] = train_one
        if self.options.gpus_per_run > 1:
            gpus, config = self.options.gpus_per_run, self.options.config
            job = partial(train_launched, gpus=gpus, config=config)
        ready = [
            run for run in self.todo if not self.timed_out and run.init_from in {None, *self.done}
        ]
        # Submit no more runs than workers: a stopped worker must not start another run.
        for run in ready[: workers - len(self.running)]:
            self.todo.remove(run)
            log = run.recipe.run_path / LOG_FILE
            say(f"{_at(self.start_time)} | {run.name}: started; its log is {log}")
            self.running[pool.submit(work, job, run.recipe, run.source_path)] = run

    def _end(self, future: Future[float]) -> None:
        """Reports a run that has ended."""
        run = self.running.pop(future)
        if _report(run, future, self.start_time):
            self.done.add(run.name)
        if isinstance(future.exception(), BrokenProcessPool):
            self.todo.clear()  # the pool accepts no further runs


def _check_requirements(chosen: Sequence[PlannedRun], options: argparse.Namespace) -> None:
    """Checks what each run needs, before any of them starts.

    Raises:
        ValueError: GPUs, a launch file, a benchmark or wandb's key do not serve; says the remedy.
    """
    launch_config(options.config)
    for run in chosen:
        run.recipe.accumulation_steps(options.gpus_per_run)
        check_wandb(run.recipe)
    for recipe in {str(run.recipe.evaluation): run.recipe for run in chosen}.values():
        check_evaluation(recipe)


def _progress(start_time: float, runs: Iterable[PlannedRun]) -> str:
    """The last line that each run printed."""
    lines = ((run.name, _last_line(run.recipe.run_path / LOG_FILE)) for run in runs)
    return "\n".join(f"{_at(start_time)} | {name}: {line}" for name, line in lines)


def _last_line(log: Path) -> str:
    """The last line of a run's log."""
    if not log.is_file():
        return "loading PyTorch …"
    with log.open("rb") as file:
        file.seek(-min(log.stat().st_size, 2**12), os.SEEK_END)
        return file.read().decode(errors="replace").rstrip().rpartition("\n")[2] or "starts …"


def _places(gpus: Sequence[str], gpus_per_run: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each parallel run; None keeps that of this process.

    Raises:
        ValueError: the number of GPUs is not a multiple of a run's.
    """
    if not gpus:
        return [None]
    if len(gpus) % gpus_per_run:
        raise ValueError(
            f"--gpus {' '.join(gpus)}: {len(gpus)} GPUs are not a multiple of --gpus-per-run "
            f"{gpus_per_run}"
        )
    firsts = range(0, len(gpus), gpus_per_run)
    return [",".join(gpus[first : first + gpus_per_run]) for first in firsts]


@contextlib.contextmanager
def _pool(
    jobs: int, gpus: Sequence[str | None], most: int
) -> Iterator[tuple[ProcessPoolExecutor, int]]:
    """The workers and their number. On a signal, those that train save and stop."""
    context = multiprocessing.get_context("spawn")
    places = context.Queue()
    for _ in range(jobs):
        for gpu in gpus:
            places.put(gpu)
    workers = max(min(jobs * len(gpus), most), 1)
    pool = ProcessPoolExecutor(workers, context, begin_worker, (places,))

    def pass_on(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.terminate()

    def stop(*_: object) -> None:
        # A second KeyboardInterrupt would break off the shutdown of the pool, whose workers and
        # this process would then wait for one another.
        for number in STOP_SIGNALS:
            signal.signal(number, pass_on)
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield pool, workers
    except KeyboardInterrupt:
        pass_on()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _report(run: PlannedRun, future: Future[float], start_time: float) -> bool:
    """Prints a line about a run that has ended; returns whether it is finished."""
    at, log = f"{_at(start_time)} | {run.name}", run.recipe.run_path / LOG_FILE
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        say(f"{at}: its worker died ({log}); the same command resumes it")
    elif error is not None:  # one run's failure must not end the others
        say(f"{at}: failed: {type(error).__name__}: {error} ({log})")
    elif not is_finished(run):
        say(f"{at}: stopped before its last step; the same command resumes it")
    else:
        say(f"{at}: {_summary(run.recipe)}, {future.result():.0f} s")
        return True
    return False


def _at(start_time: float) -> str:
    return f"{time.monotonic() - start_time:6.0f} s"


def _summary(recipe: Recipe) -> str:
    records = read_metrics(recipe.run_path)
    train = of_kind(records, "train")[-1]
    validation = of_kind(records, "validation")
    loss = f"loss {train['loss']:.4f}"
    if validation:
        loss = f"validation loss {validation[-1]['loss']:.4f}"
    nnz = train["sparsity"]["nnz_mean"]
    throughput = train["tokens_per_second"]
    return f"{loss}, {sum(nnz) / len(nnz):.1f} non-zeros, {throughput:,.0f} tokens/s at the end"
