"""A run on two ranks under random faults, for as long as asked: ``python tests/soak.py``.

Ranks and launcher are killed, get signals, raise, lose their data and meet a full disk, at random
instants, until the time is up; each time the same command goes on. At the end every step must have
been trained exactly once, to the losses of an undisturbed run, with all its records; no process may
be left, none may hang, and memory stays flat. `--record` adds the figures to results.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from conftest import ROOT, TINY, process_env, set_arguments

from sparsellm.bench.record import RESULTS, Measurement, append
from sparsellm.runs import checkpoint
from sparsellm.runs.records import METRICS_FILE, read_metrics

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
INJECTED = ("raise", "kill", "data", "disk")  # by faulty_rank.py, at a step
SENT = ("kill rank", "kill all", "kill launcher", *SIGNALS, *(f"{s} to one" for s in SIGNALS))
END_SECONDS = 90  # in which all processes must have ended after a fault
VALIDATION = 7
FAULTY = Path(__file__).parent / "training" / "faulty_rank.py"
OVERRIDES = [
    *TINY,
    "train.micro_batch_size=1",
    "data.num_workers=1",
    "optimizer.min_lr_ratio=1",  # the same rate however long it will be
    f"validation.every_steps={VALIDATION}",
    "validation.tokens=512",
    "checkpoint.every_steps=10",
]


class Soak:
    """One run in a folder, and what happened to it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ends: list[
            tuple[float, str]
        ] = []  # seconds from a fault to no process left, and its kind
        self.sessions = 0

    def path(self, name: str) -> Path:
        """Of a run."""
        return self.folder / name

    def start(self, name: str, steps: int, fault: str = "none") -> subprocess.Popen[bytes]:
        """`accelerate launch` of two ranks, one of which may meet a fault."""
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
        command += [f"--config_file={ROOT / 'launch' / 'ddp8.yaml'}", "--num_processes=2"]
        command += [str(FAULTY), fault, str(self.chance.randint(0, 1))]
        command += [str(self.chance.randint(0, 60)), "train", "--recipe", "debug"]
        own = [*OVERRIDES, f"train.steps={steps}", f"logging.run_dir={self.folder}", f"name={name}"]
        with self.path(f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *set_arguments(own)],
                stdout=log,
                stderr=log,
                env=process_env(),
                start_new_session=True,
            )

    def step(self, name: str) -> int:
        """Of the newest checkpoint."""
        newest = checkpoint.latest(self.path(name) / "checkpoints")
        found = re.search(r"step_(\d+)", newest.name) if newest else None
        return int(found[1]) if found else 0

    def fault(self) -> None:
        """One session that meets a fault."""
        kind = self.chance.choice(INJECTED + SENT)
        self.sessions += 1
        process = self.start("soak", 10**6, kind if kind in INJECTED else "none")
        if kind in SENT:
            self._until_running(process)
            time.sleep(self.chance.uniform(0, 6))
            self._send(process, kind)
        else:
            self._until_running(process)
            self._wait(process, 60, "met no fault")
        began = time.monotonic()
        self._all_end(process, kind)
        self.ends.append((time.monotonic() - began, kind))
        self.faults[kind] += 1

    def _until_running(self, process: subprocess.Popen[bytes]) -> None:
        """Most faults come while it trains; some earlier, while it starts."""
        if self.chance.random() < 0.2:
            time.sleep(self.chance.uniform(0, 12))
            return
        metrics = self.path("soak") / METRICS_FILE
        before = metrics.stat().st_mtime if metrics.exists() else 0.0
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if metrics.exists() and metrics.stat().st_mtime > before:
                return
            time.sleep(0.05)
        if process.poll() is None:
            self.problems.append("a session did not begin to train within 120 s")

    def _wait(self, process: subprocess.Popen[bytes], seconds: float, otherwise: str) -> None:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.problems.append(otherwise)
            self._kill(self._ranks())

    def _send(self, process: subprocess.Popen[bytes], kind: str) -> None:
        ranks = self._ranks()
        if kind == "kill launcher" or (not ranks and kind.startswith("kill")):
            process.kill()
        elif kind == "kill all":
            process.kill()
            self._kill(ranks)
        elif kind == "kill rank":
            self._kill([self.chance.choice(ranks)])
        elif not ranks:
            process.terminate()
        else:
            number = getattr(signal, kind.split(maxsplit=1)[0])
            for rank in [self.chance.choice(ranks)] if kind.endswith("to one") else ranks:
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(number)

    def _kill(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _ranks(self) -> list[psutil.Process]:
        """Training processes of this soak, whoever their parent is."""
        mark = f"logging.run_dir={self.folder}"
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if mark in words and "accelerate.commands.launch" not in words:
                found.append(process)
        return found

    def _all_end(self, process: subprocess.Popen[bytes], kind: str) -> None:
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None and not self._ranks():
                return
            time.sleep(0.1)
        self.problems.append(f"{kind}: processes were left {END_SECONDS} s later")
        self._kill([*self._ranks(), psutil.Process(process.pid)] if process.poll() is None else [])
        self._kill(self._ranks())

    def straight(self, name: str, steps: int, seconds: float) -> list[float]:
        """Trains undisturbed; returns the ranks' resident memory over time, MiB."""
        process, samples = self.start(name, steps), []
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            with contextlib.suppress(psutil.Error):
                ranks = self._ranks()
                if self.step(name) > 0 and len(ranks) == 2:  # after the start, before the end
                    samples.append(sum(rank.memory_info().rss for rank in ranks) / 2**20)
        if process.poll() is None:
            process.kill()
            self._all_end(process, "time is up")
        elif process.returncode:
            self.problems.append(f"{name} ended with {process.returncode}")
        return samples

    def check(self, steps: int) -> tuple[int, int]:
        """Compares records with the undisturbed run; returns (steps trained once, compared)."""
        records = read_metrics(self.path("soak"))
        train = [r for r in records if r["kind"] == "train"]
        if [(r["step"], r["tokens"]) for r in train] != [(s, 256 * s) for s in range(1, steps + 1)]:
            self.problems.append("steps are missing, double or out of order in metrics.jsonl")
        validated = [r["step"] for r in records if r["kind"] == "validation"]
        if validated != sorted({*range(VALIDATION, steps + 1, VALIDATION), steps}):
            self.problems.append(f"validations are missing or double: {validated[-5:]}")
        sessions = [r["id"] for r in records if r["kind"] == "session"]
        ended = [r["session"] for r in records if r["kind"] == "session_end"]
        if sessions != ended:
            self.problems.append("a session has no end, or two")
        reference = [r for r in read_metrics(self.path("straight")) if r["kind"] == "train"]
        pairs = list(zip(train, reference, strict=False))
        keys = ("step", "tokens", "loss", "l1", "grad_norm", "sparsity")
        differ = [a["step"] for a, b in pairs if any(a[k] != b[k] for k in keys)]
        if differ:
            self.problems.append(
                f"{len(differ)} steps differ from the undisturbed run's: {differ[:5]}"
            )
        return len(train), len(pairs)


def main() -> int:
    """Prints what happened; 1 where anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="in all (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="results.jsonl")
    options = parser.parse_args()
    began, seconds = time.monotonic(), 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, random.Random(options.seed))
    while time.monotonic() - began < 0.7 * seconds and not soak.problems:
        soak.fault()
        print(f"{time.monotonic() - began:6.0f} s, step {soak.step('soak')}: {soak.faults}")
    disturbed = time.monotonic() - began
    steps = soak.step("soak") + 15
    soak.straight("soak", steps, 300)
    memory = soak.straight("straight", steps, max(began + seconds - time.monotonic(), 60))
    once, compared = soak.check(steps)
    slowest, kind = max(soak.ends, default=(0.0, ""))
    quarter = len(memory) // 4
    growth, most = float("nan"), max(memory, default=0.0)
    if quarter >= 5:
        begin, end = memory[quarter : 2 * quarter], memory[-quarter:]
        growth = statistics.median(end) - statistics.median(begin)
    figures = [
        ("minutes_under_faults", disturbed / 60, "min"),
        ("faults_survived", sum(soak.faults.values()), "faults"),
        ("steps_trained_once", once, "steps"),
        ("steps_compared", compared, "steps equal to the undisturbed run's to the bit"),
        ("end_seconds", slowest, f"s, longest from a fault to no process left ({kind})"),
        ("memory_growth", growth, f"MiB over {quarter} s, of {most:.0f}"),
        ("problems", len(soak.problems), "problems"),
    ]
    for name, value, unit in figures:
        print(f"{name}: {value:.4g} {unit}")
    print(*soak.problems, sep="\n")
    case = {"ranks": 2, "kinds": len(soak.faults), "seed": options.seed}
    if options.record:
        append([Measurement("soak", case, n, float(v), u) for n, v, u in figures], options.record)
    if not soak.problems:
        shutil.rmtree(folder)
    else:
        print(f"all it left: {folder}")
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
