"""Mutation testing: which share of small changes in the code makes some test fail.

``python benchmarks/mutation.py --sample 60`` tries 60 mutants (mutants.py) of each group below, by
seed, and prints those that no test noticed. It first runs the group's tests once and notes which
lines each covers; then each mutant, in a copy of the tree, sees tests that cover its lines, until
one fails. A mutant that runs far longer than they did counts as killed.

Tests marked slow start processes, whose lines are not known; what no other test noticed sees all
of the group's, those named after its module first, for ``--slow-seconds``.

Results are kept in ``--folder``: the same command goes on where it was interrupted or ended by
``--seconds``, and tries survivors again with ``--retry``. Tests that fail without any mutant are
named and not used. ``--record`` appends each group's share, unless some failed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

from fork_pool import Pool
from mutants import Mutant, mutants

# What tests import of other packages; imported once, before processes are forked.
PRELOADED = (
    "accelerate",
    "datasets",
    "hypothesis",
    "tiktoken",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
)


class Group(NamedTuple):
    """Modules, and the tests that are to notice a change of them; globs."""

    modules: list[str]
    tests: list[str]


GROUPS = {
    "training": Group(
        ["sparsellm/training/*.py"], ["tests/training/test_*.py", "tests/test_model.py"]
    ),
    "positions": Group(
        [f"sparsellm/data/{name}.py" for name in ("position", "lanes", "blocks", "loader")],
        ["tests/data/test_*.py", "tests/training/test_mixture.py"],
    ),
    "checkpoints": Group(
        [
            f"sparsellm/runs/{name}.py"
            for name in ("checkpoint", "folders", "manifest", "saver", "state", "tensor_files")
        ],
        [
            "tests/runs/test_*.py",
            "tests/test_damaged_files.py",
            *(f"tests/training/test_{name}.py" for name in ("loop", "nonfinite", "formula")),
        ],
    ),
    "statistics": Group(
        [
            "sparsellm/training/counting/statistics.py",
            "sparsellm/training/counting/counters.py",
            "sparsellm/analyze/tally.py",
            "sparsellm/analyze/firing.py",
            "sparsellm/export/drop_dead.py",
        ],
        [
            *(
                f"tests/training/test_{name}.py"
                for name in (
                    "statistics",
                    "step",
                    "spikes",
                    "loop",
                    "next_step",
                    "target",
                    "kernel_policy",
                )
            ),
            "tests/analyze/test_*.py",
            "tests/export/test_drop_dead.py",
        ],
    ),
    "formats": Group(
        ["sparsellm/ffn/formats.py", "sparsellm/ffn/reference.py"], ["tests/ffn/test_*.py"]
    ),
}


OUTCOMES = ("killed", "timeout", "survived")  # "unnoticed": slow tests have not seen it yet


class Task(NamedTuple):
    """One mutant and what tries it."""

    path: str
    key: str  # module, its source and the number of the change
    mutant: Mutant
    tests: list[str]
    limit: float  # seconds


class Notes:
    """A pytest plugin: the time of each test that passes, the lines that each covers, failures.

    Args:
        modules: whose lines.
        clock: seconds; CPU time leaves out processes that a test does not wait for.
    """

    def __init__(self, modules: list[str], clock: Callable[[], float]) -> None:
        self._coverage = coverage.Coverage(data_file=None, include=modules, config_file=False)
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self) -> Iterator[None]:
        """Measures what is imported too."""
        self._coverage.start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes lines and time by test."""
        self._coverage.switch_context(item.nodeid)
        start = self._clock()
        result = yield
        self.seconds[item.nodeid] = self._clock() - start
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tests that fail or are skipped kill nothing."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self._failed.add(report.nodeid)

    def found(self, root: Path) -> dict[str, Any]:
        """By test its seconds, by module and line the tests; those that failed."""
        self._coverage.stop()
        data = self._coverage.get_data()
        self._passed -= self._failed
        lines = {
            str(Path(file).relative_to(root)): {
                line: sorted(self._passed.intersection(tests))
                for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        return {
            "seconds": {test: s for test, s in self.seconds.items() if test in self._passed},
            "lines": lines,
            "failed": sorted(self._failed),
        }


def cpu_seconds() -> float:
    """Of this process and its children that ended; other programs do not change it."""
    return sum(os.times()[:4])


def run_tests(tree: Path, tests: list[str], slow: bool, *plugins: Notes) -> int:
    """pytest in this process, up to the first failure; 0 where all pass.

    Args:
        tree: the copy.
        tests: files or single tests.
        slow: those that are marked so, or the others.
        plugins: of pytest.
    """
    options = [
        "-q",
        "-n0",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        f"not long and not gpu and {'slow' if slow else 'not slow'}",
    ]
    return int(pytest.main([*options, f"--basetemp={tree}/.tmp", *tests], plugins=list(plugins)))


def cover(root: Path, pool: Pool, group: Group, notes: Path, *, slow: bool) -> dict[str, Any]:
    """Runs a group's tests, one file a job; those that were run and passed before are read."""
    modules = files(root, group.modules)
    state = digest(root / module for module in modules) + ("-slow" if slow else "-quick")
    merged: dict[str, Any] = {"seconds": {}, "lines": {}, "failed": []}
    parts = []
    for test in files(root, group.tests):
        part = notes / f"{test.replace('/', '-')}-{state}-{digest([root / test])}.json"
        parts.append(part)
        if part.exists():
            continue

        def job(tree: Path, test: str = test, part: Path = part) -> int:
            clock = time.monotonic if slow else cpu_seconds
            plugin = Notes([str(tree / module) for module in modules], clock)
            run_tests(tree, ["--maxfail=1000", test], slow, plugin)
            part.write_text(json.dumps(plugin.found(tree)))
            return 0

        pool.run(job, 1800, lambda tree, status: None)
    pool.join()
    for part in parts:
        if not part.exists():
            raise RuntimeError(f"{part} was not made: see output.txt of the trees beside it")
        found = json.loads(part.read_text())
        merged["seconds"] |= found["seconds"]
        merged["failed"] += found["failed"]
        if found["failed"]:
            part.unlink()
        for module, lines in found["lines"].items():
            own = merged["lines"].setdefault(module, {})
            for line, tests in lines.items():
                own.setdefault(int(line), set()).update(tests)
    for test in merged["failed"]:
        print(f"fails without a mutant: {test}")
    return merged


def files(root: Path, globs: list[str]) -> list[str]:
    """Relative paths, in order."""
    return [str(p.relative_to(root)) for glob in globs for p in sorted(root.glob(glob))]


def digest(paths: Iterable[Path]) -> str:
    """Of the files' contents."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]


def tasks(root: Path, group: Group, covered: dict[str, Any], most_seconds: float) -> list[Task]:
    """All mutants of a group; each sees tests of so much CPU time."""
    found = []
    for path in files(root, group.modules):
        own = covered["lines"].get(path, {})
        state = digest([root / path])
        anywhere = set().union(*own.values())
        for number, mutant in enumerate(mutants((root / path).read_text(encoding="utf-8"))):
            lines = mutant.lines if mutant.in_function else ()
            tests = set().union(*(own.get(line, set()) for line in lines)) or anywhere
            key = f"{path}:{state}:{number}"
            found.append(seeing(Task(path, key, mutant, [], 0), tests, covered, most_seconds))
    return found


def seeing(task: Task, tests: Iterable[str], covered: dict[str, Any], most: float) -> Task:
    """The task with those tests that take at most so many seconds, and its time limit."""
    cost, stem = covered["seconds"], Path(task.path).stem
    chosen: list[str] = []
    seconds = 0.0
    # Those of a file that is named after the module first, then the quickest.
    for test in sorted(tests, key=lambda test: (stem not in test, cost[test])):
        seconds += cost[test]
        if chosen and seconds > most:
            break
        chosen.append(test)
    return task._replace(tests=chosen, limit=60 + 5 * min(seconds, most))


def try_mutants(
    root: Path,
    pool: Pool,
    chosen: list[Task],
    end: float,
    note: Callable[[str, str], None],
    *,
    slow: bool,
) -> None:
    """Notes what became of each that begins before ``end``.

    Killed, timeout, or where nothing failed: unnoticed by the quick tests, survived the slow ones.
    """

    def write(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        stamp = zlib.crc32(content)
        os.utime(path, (stamp, stamp))  # a time that no byte code of another content has

    for task in chosen:
        if time.monotonic() > end:
            break

        def job(tree: Path, task: Task = task) -> int:
            write(tree / task.path, task.mutant.source().encode())
            return run_tests(tree, task.tests, slow) if task.tests else 0

        def done(tree: Path, status: int | None, task: Task = task) -> None:
            write(tree / task.path, (root / task.path).read_bytes())
            passed = "survived" if slow else "unnoticed"
            note(task.key, "timeout" if status is None else "killed" if status else passed)
            print("T" if status is None else "." if status else "S", end="", flush=True)

        pool.run(job, task.limit, done)
    pool.join()
    print()


def report(name: str, tried: list[tuple[Task, str]]) -> float:
    """Prints the survivors; returns the share of the others."""
    outcomes = Counter(outcome for _, outcome in tried)
    for task, outcome in tried:
        if outcome == "survived":
            change, tests = str(task.mutant)[:300], len(task.tests)
            print(f"{task.path}:{task.mutant.lines.start}: {change}   ({tests} tests)")
    share = 1 - outcomes["survived"] / max(len(tried), 1)
    print(f"{name}: {share:.3f} of {len(tried)} mutants killed ({dict(outcomes)})")
    return share


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; default all")
    parser.add_argument("--sample", type=int, help="mutants of each group; default all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which none begins")
    parser.add_argument(
        "--cpu-seconds", type=float, default=60, help="of the tests that a mutant sees at most"
    )
    parser.add_argument(
        "--slow-seconds", type=float, default=120, help="the same for tests marked slow"
    )
    parser.add_argument("--retry", action="store_true", help="tries survivors again")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/sparsellm-mutation"))
    parser.add_argument("--record", type=Path, help="such as benchmarks/results.jsonl")
    return parser.parse_args()


def main() -> None:
    """See the module's docstring."""
    options = arguments()
    end = time.monotonic() + options.seconds
    root, folder = Path.cwd(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results, known = folder / "results.jsonl", {}
    if results.exists():
        known = dict(json.loads(line) for line in results.read_text().splitlines())

    def note(key: str, outcome: str) -> None:
        known[key] = outcome
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, outcome]) + "\n")

    for package in PRELOADED:
        importlib.import_module(package)
    pool = Pool(root, folder, options.jobs)
    shares, failed = [], []
    for name in options.groups or GROUPS:
        group = GROUPS[name]
        covered = cover(root, pool, group, folder, slow=False)
        failed += covered["failed"]
        every = tasks(root, group, covered, options.cpu_seconds)
        chosen = random.Random(f"{options.seed} {name}").sample(every, len(every))[: options.sample]
        again = {None, "survived"} if options.retry else {None}
        left = [task for task in chosen if known.get(task.key) in again]
        try_mutants(root, pool, left, end, note, slow=False)
        if left := [task for task in chosen if known.get(task.key) == "unnoticed"]:
            covered = cover(root, pool, group, folder, slow=True)
            failed += covered["failed"]
            tests, most = covered["seconds"], options.slow_seconds
            left = [seeing(task, tests, covered, most) for task in left]
            try_mutants(root, pool, left, end, note, slow=True)
        tried = [(task, known.get(task.key, "")) for task in chosen]
        tried = [(task, outcome) for task, outcome in tried if outcome in OUTCOMES]
        share = report(name, tried)
        case = {"group": name, "mutants": len(tried), "of": len(every), "seed": options.seed}
        case["without"] = "what only a GPU runs"  # see mutants.py
        shares.append((case, share))
    if options.record and failed:
        sys.exit(f"not recorded: {len(failed)} tests fail without a mutant; see above")
    if options.record:
        from sparsellm.bench.record import Measurement, append  # not before processes are forked

        append(
            [Measurement("mutation", c, "killed", s, "share") for c, s in shares], options.record
        )


if __name__ == "__main__":
    main()
