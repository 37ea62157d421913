"""Jobs in forked processes, each in its own copy of a project's tree."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# Folders at the top that are left out of the copies, besides hidden ones.
NOT_COPIED = {"runs", "dist", "site", "wandb"}
MOST_BYTES = 8 * 2**30  # that a job may allocate


class Pool:
    """Forks a process for each job, in one of several copies of the tree.

    Third-party packages are imported before, once; the package itself and its tests are not.
    """

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._root, self._folder = root, folder
        self._free = list(range(jobs))
        self._running: dict[int, tuple[int, float, Callable[[Path, int | None], None]]] = {}
        for slot in self._free:
            shutil.rmtree(self.tree(slot), ignore_errors=True)
            shutil.copytree(root, self.tree(slot), ignore=self._left_out)

    def _left_out(self, folder: str, names: list[str]) -> set[str]:
        at_top = Path(folder) == self._root
        return {
            name
            for name in names
            if name == "__pycache__" or (at_top and (name[0] == "." or name in NOT_COPIED))
        }

    def tree(self, slot: int) -> Path:
        """The copy of a slot."""
        return self._folder / f"tree-{slot}"

    def run(
        self,
        job: Callable[[Path], int],
        limit: float,
        done: Callable[[Path, int | None], None],
    ) -> None:
        """Starts a job, which gets its tree; waits while all are in use.

        ``done`` gets the tree and what the job returned, or None if it took longer than ``limit``
        seconds.
        """
        while not self._free:
            self._wait()
        slot = self._free.pop()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            self._work(job, slot)
        self._running[pid] = (slot, time.monotonic() + limit, done)

    def _work(self, job: Callable[[Path], int], slot: int) -> None:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            tree = self.tree(slot)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree)
            # Else processes that a test spawns would import the program that runs the jobs.
            sys.modules["__main__"] = ModuleType("__main__")
            data = self._root.parent / "shared" / "data"
            os.environ.setdefault("SPARSELLM_TEST_DATA", str(data))
            sys.path[:] = [str(tree), *(p for p in sys.path if p != str(self._root))]
            with (tree / "output.txt").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            status = job(tree)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _wait(self) -> None:
        time.sleep(0.02)
        for pid, (slot, end, done) in list(self._running.items()):
            late = time.monotonic() > end
            if late:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                with contextlib.suppress(ProcessLookupError):  # what it started
                    os.killpg(pid, signal.SIGKILL)
                del self._running[pid]
                self._free.append(slot)
                done(self.tree(slot), None if late else os.waitstatus_to_exitcode(status))

    def join(self) -> None:
        """Waits for all jobs."""
        while self._running:
            self._wait()
