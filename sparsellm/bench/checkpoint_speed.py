"""What a checkpoint costs a training run: the time a step is blocked, writing, verifying, loading.

`blocked` is the time that a step waits for the copy to host memory; the first save also allocates
that memory (`blocked_first`). Its baseline, `blocked_throughout`, is a save during which training
waits until everything is written. `save` is the time from the start of a save until the checkpoint
is published, while training continues. `step_while` is the time of a step during a save; its
baseline is a step without a save.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparsellm.bench.record import Measurement, vocabulary_key
from sparsellm.recipe import Recipe
from sparsellm.runs import checkpoint, state
from sparsellm.training.begin import warm_up
from sparsellm.training.run import Run, build_run, close_run
from sparsellm.training.run_state import begin_save
from sparsellm.training.signals import StopRequest
from sparsellm.training.step import train_step

_IDLE_STEPS = 4


def run(recipe: Recipe) -> list[Measurement]:
    """Measures saving and loading. All ranks must call it; the main rank's figures are returned.

    Raises:
        ValueError: the run's folder exists already.
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

    def say(what: str) -> None:
        accelerator.print(f"{time.perf_counter() - start:.0f} s: {what}", flush=True)

    start = time.perf_counter()
    warm_up(training)
    train_step(training, StopRequest())
    idle = median(_step(training) for _ in range(_IDLE_STEPS))
    say(f"trained {1 + _IDLE_STEPS} steps")
    first, saved, _ = _save(training)
    say(f"the first save blocked a step for {first:.2f} s and took {saved:.1f} s")
    blocked, saved, steps = _save(training)
    say(f"the second save blocked a step for {blocked:.2f} s and took {saved:.1f} s")
    throughout = _save_and_wait(training)
    say(f"a save that training waits for took {throughout:.1f} s")
    path = checkpoint.latest(training.checkpoints)
    assert path is not None
    accelerator.wait_for_everyone()
    began = time.perf_counter()
    checkpoint.load(path, accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()
    verified = time.perf_counter()
    say(f"verified in {verified - began:.1f} s")
    state.restore(training.model, training.optimizer, path, training.group)
    _wait(training)
    restored = time.perf_counter()
    gib = _gib(path)
    case: dict[str, Any] = {
        "recipe": recipe.name,
        **vocabulary_key(recipe),
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
    if steps:  # empty if the checkpoint was published before a step began
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
    """Seconds: blocking training, until publication, and of each step in between."""
    _wait(training)
    began = time.perf_counter()
    begin_save(training)
    blocked = time.perf_counter() - began
    steps = []
    # All ranks must take the same number of steps: the main rank decides.
    while not _main_says(training, training.saver.finished or training.saver.failed):
        steps.append(_step(training))
    training.saver.wait()
    return blocked, time.perf_counter() - began, steps


def _save_and_wait(training: Run) -> float:
    """Seconds of a save for whose end training waits."""
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
