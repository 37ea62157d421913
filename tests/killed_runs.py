"""A run on several GPUs, killed several times and resumed, against two that were left alone.

``python tests/killed_runs.py FOLDER [--gpus 2] [--config fsdp2] [--recipe 2b] [--kills 5]
[--steps 24] [--every 3] [--set KEY=VALUE …]``

Every other kill takes one rank alone, the others all ranks with their launcher, each at a random
moment of a step. The two undisturbed runs show by how much losses differ from one launch to the
next, since a GPU adds some numbers in any order; those of the killed run may differ by `TOLERANCE`
times as much. The learning rate is small, so that training does not amplify such differences.

Fails where a kill hit no rank, came after the run's end or left processes, where a step is missing
or double, and where losses differ by more. Needs as many GPUs as ranks; without any, ``--config
ddp8 --set ffn.kernels=auto`` runs on CPUs over gloo. With ``--seconds`` it ends with status 75
where another launch would take longer, and the same command goes on from there: the kills made so
far are in FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rank_processes import ranks_of, wait_until_gone

from sparsellm.processes import launched
from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import read_metrics

END_SECONDS = 60  # in which all processes must have ended after a kill
TOLERANCE = 3  # times the difference of two undisturbed runs
ROUNDING = 1e-6  # relative, beside it


class Trial:
    """The runs in one folder, and the kills that were made in earlier calls and this one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = options.folder.resolve()
        self._word = f"logging.run_dir={self.folder}"
        self._overrides = [
            "evaluation.every_steps=0",
            "validation.every_steps=0",
            "checkpoint.keep=1",  # 2B takes 22 GiB each, and as much while the next one is written
            "ffn.kernels=sparse",
            f"optimizer.warmup_steps={100 * options.steps}",
            *options.overrides,
            "logging.every_steps=1",
            f"train.steps={options.steps}",
            self._word,
        ]
        self._kills = self.folder / "kills.jsonl"

    @property
    def kills(self) -> list[dict]:
        """Those that were made, each of which hit ranks that trained."""
        lines = self._kills.read_text().splitlines() if self._kills.exists() else []
        return [json.loads(line) for line in lines]

    def run_path(self, name: str) -> Path:
        """The folder of one run."""
        return load_recipe(self.options.recipe, [*self._overrides, f"name={name}"]).run_path

    def command(self, name: str) -> list[str]:
        """Starts a run, or resumes it."""
        options = self.options
        every = options.every if name == "killed" else 0
        settings = [*self._overrides, f"name={name}", f"checkpoint.every_steps={every}"]
        return launched.train_command(options.config, options.gpus, options.recipe, settings, None)

    def train(self, name: str, clock: Clock) -> dict[int, float]:
        """The loss of each step of a run, which is trained to its end if it is not there yet."""
        run_path = self.run_path(name)
        if _last_step(run_path) < self.options.steps:
            began = time.perf_counter()
            with clock.launch():
                result = subprocess.run(
                    self.command(name), capture_output=True, text=True, check=False
                )
            if result.returncode:
                sys.exit(f"{name} failed: {result.stdout[-2000:]}{result.stderr[-4000:]}")
            print(f"{name}: ended after {time.perf_counter() - began:.0f} s", flush=True)
        records = read_metrics(run_path, "train")
        steps = [record["step"] for record in records]
        if steps != list(range(1, self.options.steps + 1)):
            sys.exit(f"{name}: steps are missing, double or out of order: {steps}")
        return {record["step"]: record["loss"] for record in records}

    def kill(self, step: int) -> None:
        """Kills the run in the step after ``step``, and waits until all of it is gone."""
        number, run_path = len(self.kills) + 1, self.run_path("killed")
        chance, alone = random.Random(number), number % 2 == 1
        began = time.perf_counter()
        sessions = _count_sessions(run_path)
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"kill-{number}.log"
        with log.open("wb") as output:
            launcher = psutil.Popen(self.command("killed"), stdout=output, stderr=subprocess.STDOUT)
        while (record := _newest_record(run_path, sessions)) is None or record["step"] < step:
            if launcher.poll() is not None:
                sys.exit(f"it ended by itself before kill {number}: see {log}")
            time.sleep(0.02)
        reached = time.perf_counter() - began
        rate = record["step"] * (record["tokens_per_second"] or 1) / record["tokens"]  # steps/s
        time.sleep(chance.uniform(0, min(1.0, 1 / rate)))  # also while it saves
        family, ranks = launcher.children(recursive=True), ranks_of(self._word)
        if len(ranks) != self.options.gpus:
            launched.kill(launcher)
            sys.exit(f"{len(ranks)} ranks instead of {self.options.gpus} before kill {number}")
        killed = time.perf_counter()
        for victim in [chance.choice(ranks)] if alone else [launcher, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        left = wait_until_gone([*family, launcher], END_SECONDS)
        seconds = time.perf_counter() - killed
        last, who = _last_step(run_path), "one rank" if alone else "all ranks"
        event = f"kill {number}: {who} in step {last + 1}"
        if left:
            launched.kill(launcher)
            sys.exit(f"{event}: still alive after {END_SECONDS} s: {left}; see {log}")
        if launcher.wait() == 0 or last >= self.options.steps:
            sys.exit(f"{event}: too late, the run had ended; see {log}")
        with self._kills.open("a") as kills_file:
            kills_file.write(json.dumps({"who": who, "after": last, "seconds": seconds}) + "\n")
        print(f"{event} (reached in {reached:.0f} s); all gone in {seconds:.1f} s", flush=True)


class Clock:
    """Ends the program where there is no time for another launch as long as the longest so far."""

    def __init__(self, seconds: float) -> None:
        self._end, self._longest = time.perf_counter() + seconds, 0.0

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """Around each launch."""
        began = time.perf_counter()
        if began + 1.2 * self._longest > self._end:
            print("no time for another launch: the same command goes on from here")
            sys.exit(75)  # EX_TEMPFAIL
        yield
        self._longest = max(self._longest, time.perf_counter() - began)


def kill_steps(steps: int, kills: int, every: int) -> list[int]:
    """After which steps a run of ``steps`` is killed, so that no kill comes after its end.

    Raises:
        ValueError: there are too few steps for so many kills and a checkpoint ``every`` so many.
    """
    chosen = [number * steps // (kills + 1) for number in range(1, kills + 1)]
    # A step further the run may be when the kill comes; and of two checkpoints that were begun the
    # first is there, since a save waits for the one before it.
    if chosen[0] < 1 or chosen[-1] > steps - 2 or chosen[-1] <= 2 * every:
        raise ValueError(
            f"--steps {steps}: too few for {kills} kills and a checkpoint every {every} steps"
        )
    return chosen


def main() -> None:
    """Prints what happened; ends with an error where anything was not as it must be."""
    options = _options()
    try:
        planned = kill_steps(options.steps, options.kills, options.every)
    except ValueError as error:
        sys.exit(f"error: {error}")
    trial, clock = Trial(options), Clock(options.seconds)
    first, second = (trial.train(name, clock) for name in ("undisturbed", "again"))
    run_path = trial.run_path("killed")
    if _last_step(run_path) < options.steps:
        for step in planned[len(trial.kills) :]:
            with clock.launch():
                trial.kill(step)
    killed = trial.train("killed", clock)
    checkpoint.load(checkpoint.latest(run_path / "checkpoints"))
    records = read_metrics(run_path)
    resumed = [record["step"] for record in records if record["kind"] == "session"]
    ends = [record["how"] for record in records if record["kind"] == "session_end"]
    # Where another rank was killed, the main rank may still write that its session failed.
    num_kills, num_ended = len(trial.kills), sum(ending != "finished" for ending in ends)
    usual, apart = _largest_difference(second, first), _largest_difference(killed, first)
    slowest = max(kill["seconds"] for kill in trial.kills)
    print(
        f"{num_kills} kills: all {options.steps} steps once, resumed from steps {resumed[1:]}; all "
        f"processes gone within {slowest:.1f} s; losses within {apart:.2e} (relative) of an "
        f"undisturbed run, another undisturbed one within {usual:.2e}"
    )
    if num_kills != options.kills or num_ended != num_kills or not any(resumed):
        sys.exit(
            f"error: {num_kills} of {options.kills} kills were made; the sessions ended so: {ends}"
        )
    if apart > TOLERANCE * usual + ROUNDING:
        sys.exit(f"error: more than {TOLERANCE} times as far apart as two undisturbed runs")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--config", default="fsdp2")
    parser.add_argument("--recipe", default="2b")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    return parser.parse_args()


def _largest_difference(actual: dict[int, float], expected: dict[int, float]) -> float:
    return max(abs(actual[step] - loss) / abs(loss) for step, loss in expected.items())


def _records(run_path: Path) -> list[dict]:
    try:
        return read_metrics(run_path)
    except FileNotFoundError:
        return []


def _last_step(run_path: Path) -> int:
    steps = [record["step"] for record in _records(run_path) if record["kind"] == "train"]
    return steps[-1] if steps else 0


def _count_sessions(run_path: Path) -> int:
    return sum(record["kind"] == "session" for record in _records(run_path))


def _newest_record(run_path: Path, sessions: int) -> dict | None:
    """Of the last step of the launch after so many; steps before its first are of earlier ones."""
    records = _records(run_path)
    starts = [i for i, record in enumerate(records) if record["kind"] == "session"]
    session_records = records[starts[-1] :] if len(starts) > sessions else []
    trained = [record for record in session_records if record["kind"] == "train"]
    return trained[-1] if trained else None


if __name__ == "__main__":
    main()
