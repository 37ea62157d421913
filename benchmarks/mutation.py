"""Mutation testing: which share of small changes in the code makes some test fail.

``python benchmarks/mutation.py --sample 60`` tries 60 mutants (mutants.py) of each group below, by
seed, and prints those that no test noticed. It first runs the group's tests once and notes which
lines each covers; then each mutant, in a copy of the tree, sees tests that cover its lines, until
one fails. A mutant that runs far longer than they did counts as killed.

Results are kept in ``--folder``: the same command goes on where it was interrupted or ended by
``--seconds``, and tries survivors again with ``--retry``. ``--record`` appends each group's share.
Tests that start processes of their own (marked slow) are not among those that are run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import random
import shlex
import sys
import time
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
    "pandas",
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
        [f"sparsellm/runs/{name}.py" for name in ("checkpoint", "manifest", "saver", "state")],
        [
            "tests/runs/test_*.py",
            *(f"tests/training/test_{name}.py" for name in ("loop", "nonfinite", "formula")),
        ],
    ),
    "formats": Group(
        ["sparsellm/ffn/formats.py", "sparsellm/ffn/reference.py"], ["tests/ffn/test_*.py"]
    ),
}


class Task(NamedTuple):
    """One mutant and what tries it."""

    path: str
    key: str  # module, its source and the number of the change
    mutant: Mutant
    tests: list[str]
    limit: float  # seconds


class Notes:
    """A pytest plugin: the time of each test that passes, and the lines that each covers."""

    def __init__(self, modules: list[str]) -> None:
        self._coverage = coverage.Coverage(data_file=None, include=modules, config_file=False)
        self.seconds: dict[str, float] = {}
        self._passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self) -> Iterator[None]:
        """Measures what is imported too."""
        self._coverage.start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes lines by test, and its CPU time, which other programs do not change."""
        self._coverage.switch_context(item.nodeid)
        start = sum(os.times()[:4])
        result = yield
        self.seconds[item.nodeid] = sum(os.times()[:4]) - start
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tests that fail or are skipped kill nothing."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def found(self, root: Path) -> dict[str, Any]:
        """By test its seconds, by module and line the tests."""
        self._coverage.stop()
        data = self._coverage.get_data()
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
        }


def run_tests(tree: Path, tests: list[str], *plugins: Notes) -> int:
    """pytest in this process, up to the first failure; 0 where all pass."""
    options = [
        "-q",
        "-n0",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long and not slow and not gpu",
    ]
    return int(pytest.main([*options, f"--basetemp={tree}/.tmp", *tests], plugins=list(plugins)))


def cover(root: Path, pool: Pool, group: Group, notes: Path) -> dict[str, Any]:
    """Runs a group's tests, one file a job; those that were run before are read."""
    modules = files(root, group.modules)
    state = digest(root / module for module in modules)
    merged: dict[str, Any] = {"seconds": {}, "lines": {}}
    parts = []
    for test in files(root, group.tests):
        part = notes / f"{test.replace('/', '-')}-{state}-{digest([root / test])}.json"
        parts.append(part)
        if part.exists():
            continue

        def job(tree: Path, test: str = test, part: Path = part) -> int:
            plugin = Notes([str(tree / module) for module in modules])
            run_tests(tree, ["--maxfail=1000", test], plugin)
            part.write_text(json.dumps(plugin.found(tree)))
            return 0

        pool.run(job, 1800, lambda tree, status: None)
    pool.join()
    for part in parts:
        if not part.exists():
            raise RuntimeError(f"{part} was not made: see output.txt of the trees beside it")
        found = json.loads(part.read_text())
        merged["seconds"] |= found["seconds"]
        for module, lines in found["lines"].items():
            own = merged["lines"].setdefault(module, {})
            for line, tests in lines.items():
                own.setdefault(int(line), set()).update(tests)
    return merged


def files(root: Path, globs: list[str]) -> list[str]:
    """Relative paths, in order."""
    return [str(p.relative_to(root)) for glob in globs for p in sorted(root.glob(glob))]


def digest(paths: Iterable[Path]) -> str:
    """Of the files' contents."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]


def tasks(root: Path, group: Group, covered: dict[str, Any], most_seconds: float) -> list[Task]:
    """All mutants of a group; each sees tests of so much CPU time."""
    found, cost = [], covered["seconds"]
    for path in files(root, group.modules):
        own, stem = covered["lines"].get(path, {}), Path(path).stem
        state = digest([root / path])
        anywhere = set().union(*own.values())
        for number, mutant in enumerate(mutants((root / path).read_text(encoding="utf-8"))):
            lines = mutant.lines if mutant.in_function else ()
            tests = set().union(*(own.get(line, set()) for line in lines)) or anywhere
            chosen: list[str] = []
            seconds = 0.0
            # Those of a file that is named after the module first, then the quickest.
            for test in sorted(tests, key=lambda test: (stem not in test, cost[test])):
                seconds += cost[test]
                if chosen and seconds > most_seconds:
                    break
                chosen.append(test)
            limit = 60 + 5 * min(seconds, most_seconds)
            found.append(Task(path, f"{path}:{state}:{number}", mutant, chosen, limit))
    return found


def try_mutants(
    root: Path, pool: Pool, chosen: list[Task], end: float, note: Callable[[str, str], None]
) -> None:
    """Notes what became of each that begins before ``end``: killed, survived or timeout."""

    def write(path: Path, content: bytes, stamp: int) -> None:
        path.write_bytes(content)
        os.utime(path, (stamp, stamp))  # a time that no byte code of another content has

    for number, task in enumerate(chosen):
        if time.monotonic() > end:
            break

        def job(tree: Path, task: Task = task, stamp: int = 2 * number) -> int:
            write(tree / task.path, task.mutant.source().encode(), stamp)
            return run_tests(tree, task.tests) if task.tests else 0

        def done(
            tree: Path, status: int | None, task: Task = task, stamp: int = 2 * number + 1
        ) -> None:
            write(tree / task.path, (root / task.path).read_bytes(), stamp)
            note(task.key, "timeout" if status is None else "killed" if status else "survived")
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


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; default all")
    parser.add_argument("--sample", type=int, help="mutants of each group; default all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which none begins")
    parser.add_argument(
        "--cpu-seconds", type=float, default=60, help="of the tests that a mutant sees at most"
    )
    parser.add_argument("--retry", action="store_true", help="tries survivors again")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/sparsellm-mutation"))
    parser.add_argument("--record", type=Path, help="such as benchmarks/results.jsonl")
    options = parser.parse_args()
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
    shares = []
    for name in options.groups or GROUPS:
        covered = cover(root, pool, GROUPS[name], folder)
        every = tasks(root, GROUPS[name], covered, options.cpu_seconds)
        chosen = random.Random(f"{options.seed} {name}").sample(every, len(every))[: options.sample]
        again = {None, "survived"} if options.retry else {None}
        left = [task for task in chosen if known.get(task.key) in again]
        try_mutants(root, pool, left, end, note)
        tried = [(task, known[task.key]) for task in chosen if task.key in known]
        share = report(name, tried)
        case = {"group": name, "mutants": len(tried), "of": len(every), "seed": options.seed}
        shares.append((case, share))
    if options.record:
        from sparsellm.bench.record import Measurement, append  # not before processes are forked

        taken = {"command": shlex.join(["python", *sys.argv])}
        append(
            [Measurement("mutation", c, "killed", s, "share", taken=taken) for c, s in shares],
            options.record,
        )


if __name__ == "__main__":
    main()
