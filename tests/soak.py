"""A run on two ranks under random faults, for as long as asked: ``python tests/soak.py``.

Ranks and launcher are killed, stall, get signals, raise, lose their data and meet a full disk;
checkpoints are damaged, copied, purged and gone back on; other trainings, strays and text that one
rank alone sees come into the run's; its folder is copied. Every 37th step is NaN and every 53rd
reads a damaged batch. Each time the same command goes on. At the end every step must have been
trained or skipped exactly once, to the losses of an undisturbed run, with all its records; no
process may be left, none may hang, and memory stays flat. `--record` adds the figures to
results.jsonl.
"""

import argparse
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from soak_faults import FAULTS, undisturbed
from soak_run import VALIDATION, Session, last_step

from sparsellm.bench.record import RESULTS, Measurement, append
from sparsellm.runs.telemetry.records import METRICS_FILE, read_metrics


class Soak:
    """One run in a folder, and what happened to it."""

    def __init__(self, folder: Path, chance: random.Random, kinds: list[str]) -> None:
        self.folder, self.chance, self.kinds = folder, chance, kinds
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = (0.0, "")  # seconds from a fault to no process left, and its kind
        self._deck: list[str] = []

    def fault(self) -> None:
        """One session that meets a fault: all kinds in random order, and then again.

        Where the kinds that are left need a checkpoint and there is none, it meets no fault.
        """
        if not self._deck:
            self._deck = self.chance.sample(self.kinds, len(self.kinds))
        for kind in self._deck:
            if met := FAULTS[kind](self.folder, self.chance):
                self._deck.remove(kind)
                self.faults[kind] += 1
                break
        else:
            kind, met = "none", undisturbed(self.folder, self.chance)
        session, problem = met
        began = time.monotonic()
        if not session.all_end():
            problem = problem or "processes were left"
        self.slowest = max(self.slowest, (time.monotonic() - began, kind))
        if problem:
            self.problems.append(f"{kind}: {problem}")

    def straight(self, name: str, steps: int, seconds: float) -> list[float]:
        """Trains undisturbed; returns the ranks' resident memory over time, MiB."""
        session = Session(self.folder, name, arguments=("--set", f"train.steps={steps}"))
        samples = []
        end = time.monotonic() + seconds
        while session.alive and time.monotonic() < end:
            time.sleep(0.5)
            with contextlib.suppress(psutil.Error):
                ranks = session.ranks()
                if last_step(session.run_path) > 0 and len(ranks) == 2:  # neither start nor end
                    samples.append(sum(rank.memory_info().rss for rank in ranks) / 2**20)
        if session.alive:
            session.kill_launcher()
            session.all_end()
        elif session.status:
            self.problems.append(f"{name} ended with {session.status}: {session.said[-500:]}")
        return samples

    def check(self, steps: int) -> dict[str, int]:
        """Compares records with the undisturbed run; returns numbers of steps."""
        records = read_metrics(self.folder / "soak")
        train = [r for r in records if r["kind"] == "train"]
        failures = [r for r in records if r["kind"] == "failure"]
        skipped = [r for r in failures if r["what"] == "step"]
        done = sorted((r["step"], r["tokens"]) for r in [*train, *skipped])
        if done != [(s, 256 * s) for s in range(1, steps + 1)]:
            self.problems.append("steps are missing, double or out of order in metrics.jsonl")
        validated = [r["step"] for r in records if r["kind"] == "validation"]
        validated += [r["step"] for r in failures if r["what"] == "validation"]
        if sorted(validated) != sorted({*range(VALIDATION, steps + 1, VALIDATION), steps}):
            self.problems.append(f"validations are missing or double: {sorted(validated)[-5:]}")
        sessions = [r["id"] for r in records if r["kind"] == "session"]
        ended_sessions = [r["session"] for r in records if r["kind"] == "session_end"]
        if sessions != ended_sessions:
            self.problems.append("a session has no end, or two")
        undisturbed = self.folder / "straight"
        reference = {
            (r["kind"], r["step"]): r
            for r in (read_metrics(undisturbed) if (undisturbed / METRICS_FILE).exists() else ())
            if r["kind"] == "train" or (r["kind"] == "failure" and r["what"] == "step")
        }
        keys = ("tokens", "loss", "l1", "grad_norm", "skipped_steps", "sparsity", "error")
        last = max((step for _, step in reference), default=0)
        compared = [r for r in [*train, *skipped] if r["step"] <= last]
        differ = [
            r["step"]
            for r in compared
            if any(r.get(k) != reference.get((r["kind"], r["step"]), {}).get(k) for k in keys)
        ]
        if differ:
            self.problems.append(
                f"{len(differ)} steps differ from the undisturbed run's: {differ[:5]}"
            )
        if not compared:
            self.problems.append("no step could be compared with the undisturbed run")
        return {"trained": len(train), "skipped": len(skipped), "compared": len(compared)}


def main() -> int:
    """Prints what happened; 1 where anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="in all (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="results.jsonl")
    options = parser.parse_args()
    began, seconds = time.monotonic(), 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, random.Random(options.seed), options.kinds)
    while time.monotonic() - began < 0.78 * seconds and not soak.problems:
        soak.fault()
        print(f"{time.monotonic() - began:6.0f} s, step {last_step(folder / 'soak')}", end=": ")
        print(*(f"{count} {kind}," for kind, count in soak.faults.items()), flush=True)
    disturbed = time.monotonic() - began
    steps = last_step(folder / "soak") + 15
    soak.straight("soak", steps, 300)
    memory = soak.straight("straight", steps, max(began + seconds - time.monotonic(), 60))
    counts = soak.check(steps)
    figures = [
        ("minutes_under_faults", disturbed / 60, "min"),
        ("faults_survived", sum(soak.faults.values()), "faults"),
        *((f"survived: {kind}", count, "faults") for kind, count in sorted(soak.faults.items())),
        ("steps_trained_once", counts["trained"], "steps"),
        ("steps_skipped_once", counts["skipped"], "steps, NaN or a spike"),
        ("tokens_once", 256 * steps, "tokens"),
        ("steps_compared", counts["compared"], "steps equal to the undisturbed run's to the bit"),
        ("end_seconds", soak.slowest[0], f"s, longest to no process left ({soak.slowest[1]})"),
        *_growth(memory),
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


def _growth(memory: list[float]) -> list[tuple[str, float, str]]:
    """From the second quarter of the undisturbed run to the last; none if that was too short."""
    quarter = len(memory) // 4
    if quarter < 5:
        return []
    begin, end = memory[quarter : 2 * quarter], memory[-quarter:]
    growth = statistics.median(end) - statistics.median(begin)
    return [("memory_growth", growth, f"MiB over {quarter} s, of {max(memory):.0f}")]


if __name__ == "__main__":
    sys.exit(main())
