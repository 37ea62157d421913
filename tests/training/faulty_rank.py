"""`sparsellm` with a fault in one rank: ``faulty_rank.py KIND RANK STEP train …``.

The fault comes when the rank is about to do the step after STEP finished ones, once: its next
process finds the file that the first one left (``FAULT_DONE``, if set).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from sparsellm.cli import main
from sparsellm.training import loop


def _raise() -> None:
    raise RuntimeError("injected fault")


KINDS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
}


def inject(kind: str, step: int) -> None:
    """Has the loop meet the fault."""
    done = os.environ.get("FAULT_DONE")
    real = loop.train_step

    def train_step(run, stop):
        if run.step == step and not (done and Path(done).exists()):
            if done:
                Path(done).touch()
            if kind == "data":
                _break_loader(run.loader)
            else:
                KINDS[kind]()
        return real(run, stop)

    loop.train_step = train_step


def _break_loader(loader) -> None:
    def fail(self):
        raise FileNotFoundError("shard 7 is missing; restore it")

    loader.__class__ = type("Broken", (type(loader),), {"__next__": fail})


if __name__ == "__main__":
    kind, rank, step, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        inject(kind, int(step))
    sys.exit(main(arguments))
