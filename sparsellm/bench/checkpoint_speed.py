"""What a checkpoint costs a training run: the wait of a step, writing, verifying and loading.

`blocked` is what the step waits for: the copy to host memory, which the first one also makes; in
brackets how many times longer it would wait if nothing were written in the background
(`blocked_throughout`). `save` is from its beginning until the checkpoint is published, while
training goes on; `step_while` is a step of then, in brackets a step without over it.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparsellm.bench.record import Measurement
from sparsellm.recipe import Recipe
from sparsellm.runs import checkpoint, state
from sparsellm.training.begin import warm_up
from sparsellm.training.loop import train_step
from sparsellm.training.run import Run, build_run, close_run
from sparsellm.training.run_state import begin_save
from sparsellm.training.signals import StopRequest

_IDLE_STEPS = 4


def run(recipe: Recipe) -> list[Measurement]:
    """All ranks of the launch call it; the main rank's figures.

    Raises:
        ValueError: the run's folder exists.
    """
    if recipe.run_path.exists():
        raise ValueError(f"{recipe.run_path} exists; give another name: --set name=NEW")
    training = build_run(recipe)
    try:
        found = _measure(training)
        training.accelerator.wait_for_everyone()
        return found
    finally:
        main = training.accelerator.is_main_process
        close_run(training)
        if main:
            shutil.rmtree(recipe.run_path, ignore_errors=True)


def _measure(training: Run) -> list[Measurement]:
    accelerator, recipe = training.accelerator, training.recipe
    warm_up(training)
    train_step(training, StopRequest())
    idle = median(_step(training) for _ in range(_IDLE_STEPS))
    first, _, _ = _save(training)
    blocked, saved, steps = _save(training)
    throughout = _save_and_wait(training)
    path = checkpoint.latest(training.checkpoints)
    assert path is not None
    accelerator.wait_for_everyone()
    began = time.perf_counter()
    checkpoint.load(path, accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()
    verified = time.perf_counter()
    state.restore(training.model, training.optimizer, path, training.group)
    _wait(training)
    restored = time.perf_counter()
    gib = _gib(path)
    case: dict[str, Any] = {
        "recipe": recipe.name,
        "layers": recipe.model.num_hidden_layers,
        "gpus": accelerator.num_processes,
        "sharded": bool(accelerator.is_fsdp2),
        "GiB": round(gib, 2),
    }
    values: list[tuple[str, float, str, float | None]] = [
        ("blocked_first", first, "s", None),
        ("blocked", blocked, "s", throughout),
        ("blocked_throughout", throughout, "s", None),
        ("save", saved, "s", None),
        ("save_rate", gib / saved, "GiB/s", None),
        ("verify", verified - began, "s", None),
        ("verify_rate", gib / (verified - began), "GiB/s", None),
        ("load", restored - verified, "s", None),
    ]
    if steps:  # it was not published within a step
        values.append(("step_while", median(steps), "s", idle))
    return [
        Measurement("checkpoint", case, name, value, unit, base, base / value if base else None)
        for name, value, unit, base in values
    ]


def _step(training: Run) -> float:
    began = time.perf_counter()
    train_step(training, StopRequest())
    _wait(training)
    return time.perf_counter() - began


def _save(training: Run) -> tuple[float, float, list[float]]:
    """Seconds that the step waited, until it was published, and of each step until then."""
    _wait(training)
    began = time.perf_counter()
    begin_save(training)
    blocked = time.perf_counter() - began
    steps = []
    # All ranks take the same steps: the main rank's word counts.
    while not _main_says(training, training.saver.finished or training.saver.failed):
        steps.append(_step(training))
    training.saver.wait()
    return blocked, time.perf_counter() - began, steps


def _save_and_wait(training: Run) -> float:
    """Seconds of a save during which nothing else is done."""
    _step(training)
    training.accelerator.wait_for_everyone()
    began = time.perf_counter()
    begin_save(training)
    training.saver.wait()
    training.accelerator.wait_for_everyone()
    return time.perf_counter() - began


def _main_says(training: Run, flag: bool) -> bool:
    if training.accelerator.num_processes == 1:
        return flag
    word = torch.tensor(int(flag), device=training.accelerator.device)
    torch.distributed.broadcast(word, src=0)
    return bool(word.item())


def _wait(training: Run) -> None:
    if training.accelerator.device.type == "cuda":
        torch.cuda.synchronize(training.accelerator.device)


def _gib(path: Path) -> float:
    return sum(file.stat().st_size for file in path.iterdir()) / 2**30
