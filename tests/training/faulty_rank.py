"""`sparsellm` with a fault in one rank: ``faulty_rank.py KIND RANK STEPS train …``.

The fault comes once, when the process has done so many steps; ``none`` is none. With
``SPARSELLM_TEST_IMPATIENT`` ranks wait for one another for seconds where they would for minutes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from sparsellm.cli import main
from sparsellm.training import loop, peers


def _raise() -> None:
    raise RuntimeError("injected fault")


def _fill_disk() -> None:
    # Files cannot grow beyond this: the kernel refuses as it does where a disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


KINDS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "disk": _fill_disk,
}


def inject(kind: str, steps: int) -> None:
    """Has the loop meet the fault."""
    real, done = loop.train_step, []

    def train_step(run, stop):
        if len(done) == steps:
            if kind == "data":
                _break_loader(run.loader)
            else:
                KINDS[kind]()
        done.append(run.step)
        return real(run, stop)

    loop.train_step = train_step


def _break_loader(loader) -> None:
    def fail(self):
        raise FileNotFoundError("shard 7 is missing; restore it")

    loader.__class__ = type("Broken", (type(loader),), {"__next__": fail})


if __name__ == "__main__":
    kind, rank, steps, *arguments = sys.argv[1:]
    if os.environ.get("SPARSELLM_TEST_IMPATIENT"):
        # Of runtime.timeout_minutes 2, the least, 12 seconds are left.
        peers.REPORT_SECONDS, peers.SILENT_SECONDS, peers.EARLY_SECONDS = 3.0, 12.0, 108.0
    if kind != "none" and os.environ.get("RANK", "0") == rank:
        inject(kind, int(steps))
    sys.exit(main(arguments))
