"""A run on several GPUs, killed several times and resumed, against one that was left alone.

``python tests/gpu/killed_runs.py FOLDER [--gpus 2] [--config fsdp2] [--recipe 2b] [--kills 5]
[--steps 24] [--set KEY=VALUE …]``

Every other kill takes one rank alone, the others all ranks with their launcher, each at a random
moment between two records. Prints the largest relative difference of a step's loss, and how long
the ranks that were left took to end. Needs as many GPUs as ranks; without any, ``--config ddp8``
runs on CPUs over gloo. With ``--seconds`` it ends where another launch would take longer, and the
same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.training.launched import train_command, train_records


def main() -> None:
    options = _options()
    overrides = [
        "evaluation.every_steps=0",
        "validation.every_steps=0",
        "logging.every_steps=1",
        "checkpoint.every_steps=3",
        "checkpoint.keep=1",  # 2B takes 24 GiB each, and as much while the next one is written
        f"train.steps={options.steps}",
        "ffn.kernels=sparse",
        "optimizer.warmup_steps=4",
        *options.overrides,
        f"logging.run_dir={options.folder}",
    ]
    clock = _Clock(options.seconds)
    straight = _train(options, [*overrides, "name=straight", "checkpoint.every_steps=0"], clock)
    print(f"undisturbed: {len(straight)} steps", flush=True)
    own = [*overrides, "name=killed"]
    run_path = load_recipe(options.recipe, own).run_path
    for number in range(options.kills):
        done = (number + 1) * options.steps // (options.kills + 1)
        if _last_step(run_path) < done:  # else an earlier call of this command has killed it
            chance = random.Random(number)
            with clock.launch():
                _kill_after(options, own, run_path, done, alone=number % 2 == 0, chance=chance)
    killed = _train(options, own, clock)
    losses = {record["step"]: record["loss"] for record in killed}
    assert sorted(losses) == list(range(1, options.steps + 1)), sorted(losses)
    largest = max(abs(losses[r["step"]] - r["loss"]) / abs(r["loss"]) for r in straight)
    checkpoint.load(checkpoint.latest(run_path / "checkpoints"))
    print(f"{options.kills} kills: all steps once; losses within {largest:.2e} (relative)")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--config", default="fsdp2")
    parser.add_argument("--recipe", default="2b")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    return parser.parse_args()


def _command(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    return train_command(options.config, options.gpus, options.recipe, overrides, None)


class _Clock:
    """Ends the program where there is no time for another launch as long as the longest so far."""

    def __init__(self, seconds: float) -> None:
        self._end, self._longest = time.perf_counter() + seconds, 0.0

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        began = time.perf_counter()
        if began + 1.2 * self._longest > self._end:
            print("no time for another launch: the same command goes on from here")
            sys.exit(75)  # EX_TEMPFAIL
        yield
        self._longest = max(self._longest, time.perf_counter() - began)


def _train(options: argparse.Namespace, overrides: list[str], clock: _Clock) -> list[dict]:
    run_path = load_recipe(options.recipe, overrides).run_path
    if _last_step(run_path) == options.steps:
        return train_records(run_path)
    began = time.perf_counter()
    with clock.launch():
        result = subprocess.run(
            _command(options, overrides), capture_output=True, text=True, check=False
        )
    if result.returncode:
        sys.exit(f"{run_path.name} failed: {result.stdout[-2000:]}{result.stderr[-4000:]}")
    print(f"{run_path.name}: ended after {time.perf_counter() - began:.0f} s", flush=True)
    return train_records(run_path)


def _kill_after(options, overrides, run_path, step, *, alone, chance) -> None:
    """Kills the run once it has done ``step`` steps, and waits until all of it is gone."""
    began = time.perf_counter()
    log = run_path.with_name(f"killed-at-{step}.log").open("wb")
    launcher = psutil.Popen(_command(options, overrides), stdout=log, stderr=subprocess.STDOUT)
    before = _last_step(run_path)  # of which the steps after the checkpoint are done again
    while (done := _last_step(run_path)) < step or done == before:
        if launcher.poll() is not None:
            sys.exit(f"it ended by itself: see {log.name}")
        time.sleep(0.02)
    reached = time.perf_counter() - began
    time.sleep(chance.uniform(0, 1.0))  # also while it saves
    family = launcher.children(recursive=True)
    ranks = [process for process in family if "sparsellm" in " ".join(process.cmdline())]
    for victim in [ranks[-1]] if alone else [launcher, *family]:
        if victim.is_running():
            victim.kill()
    killed = time.perf_counter()
    _, left = psutil.wait_procs([launcher, *family], timeout=120)
    ended = time.perf_counter() - killed
    who = "one rank" if alone else "all ranks"
    print(f"{who} killed after step {step} (reached in {reached:.0f} s); gone in {ended:.0f} s")
    if left:
        sys.exit(f"still alive after {ended:.0f} s: {left}")


def _last_step(run_path: Path) -> int:
    try:
        records = train_records(run_path)
    except FileNotFoundError:
        return 0
    return records[-1]["step"] if records else 0


if __name__ == "__main__":
    main()
