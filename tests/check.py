"""``make check``: lint, types, and the fast tests of what changed, within a minute.

What changed is what differs from where this branch left main, or where nothing does, the last
commit. Tests marked ``slow`` or ``long`` are left to ``make test``, as are those that there is no
time for: first come the changed test files and those with the name of a changed module.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 35  # for tests; collecting them takes some more, as do lint and types meanwhile
# Where the tests of folders outside the package are.
OTHERS = {
    "benchmarks": "benchmarks",
    "cuda": "ffn/kernels",
    "data": "data",
    "eval": "evaluate",
    "launch": "test_launch.py",
    "recipes": "recipe",
}
LINTERS = (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("mypy",))


def changed_files(root: Path) -> list[str]:
    """Relative paths of files that are there."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.split("\n")[:-1]

    base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    diff = ("diff", "--name-only", "--diff-filter=d")
    changed = git(*diff, base[0]) + git("ls-files", "--others", "--exclude-standard")
    return changed or git(*diff, "HEAD~1", "HEAD")


def nearest_tests(changed: Iterable[str], tests: Path) -> list[str]:
    """Files and folders under ``tests``, those that are nearest to the changes first."""
    first_paths: list[Path] = [tests / "test_structure.py"]
    later_paths: list[Path] = []
    for name in changed:
        path = PurePosixPath(name)
        folder, *inner = path.parts[:-1] or ("",)
        if folder == "tests" and path.name.startswith("test_"):
            first_paths.append(tests.joinpath(*inner, path.name))
        elif folder == "tests" and inner and path.suffix == ".py":
            later_paths.append(tests.joinpath(*inner))
        elif folder == "sparsellm":
            rooms = [tests.joinpath(*inner[:depth]) for depth in range(len(inner), 0, -1)]
            room = next(filter(Path.is_dir, rooms), None)
            first_paths += (room or tests).glob(
                f"**/test_{path.stem}.py" if room else f"test_{path.stem}.py"
            )
            later_paths += (
                [room] if room else tests.glob(f"test_{inner[0] if inner else path.stem}.py")
            )
        elif folder in OTHERS:
            later_paths.append(tests / OTHERS[folder])
    return [str(path) for path in dict.fromkeys(first_paths + later_paths) if path.exists()]


class TimeLimit:
    """Begins no test after so many seconds, and says how many that leaves out."""

    def __init__(self, seconds: float) -> None:
        self.end, self.left_out = seconds, 0

    def pytest_runtestloop(self) -> None:
        """The time begins with the first test."""
        self.end += time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """True: the test is not run."""
        if time.monotonic() < self.end:
            return None
        self.left_out += 1
        return True


def _linters() -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Started, each with the file of what it prints."""
    folder = Path(tempfile.mkdtemp())
    for number, words in enumerate(LINTERS):
        output = folder / str(number)
        with output.open("wb") as file:
            command = [sys.executable, "-m", *words]
            yield (
                " ".join(words),
                subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file),
                output,
            )


def main() -> int:
    """Returns the exit status."""
    linters, limit = list(_linters()), TimeLimit(SECONDS)
    paths = nearest_tests(changed_files(ROOT), ROOT / "tests")
    fast = ["-m", "not slow and not long and not gpu", "-q", "-p", "no:xdist", "--durations=3"]
    status = pytest.main([*fast, *paths], plugins=[limit])
    failed = (
        [] if status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED} else ["pytest"]
    )
    if limit.left_out:
        print(f"{limit.left_out} tests of what changed were not run: `make test` runs all")
    for name, process, output in linters:
        if process.wait():
            failed.append(name)
            print(f"\n{name}\n{output.read_text(encoding='utf-8')}")
    print(f"make check: {' and '.join(failed)} failed" if failed else "make check: passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
