"""`sparsellm` with a fault in one rank: ``faulty_rank.py KIND RANK STEPS train …``.

The fault comes once, when the process has done so many steps, that of ``kill-save`` after so many
saves; ``none`` is none. With ``elsewhere`` the rank works in the folder STEPS.

With ``SPARSELLM_TEST_PATIENCE`` ranks wait so many seconds for one another where they would for
minutes; `runtime.timeout_minutes` must be 2, the least. With ``SPARSELLM_TEST_DAMAGE`` every 37th
step is NaN on rank 1, and every 53rd reads a damaged batch.
"""

import os
import resource
import signal
import sys
import time

from damaged_batch import damage, spoil

from sparsellm.cli import main
from sparsellm.processes import peers
from sparsellm.runs import saver
from sparsellm.training import loop, validation


def _raise() -> None:
    raise RuntimeError("injected fault")


def _fill_disk() -> None:
    # Files cannot grow beyond this: the kernel refuses as it does where a disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _fail_validation() -> None:
    def fail(*arguments):
        validation.ValidationSet._add_batch = real
        raise RuntimeError("injected fault of a validation")

    real, validation.ValidationSet._add_batch = validation.ValidationSet._add_batch, fail


KINDS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "disk": _fill_disk,
    "validation": _fail_validation,
}


def inject(kind: str, steps: int) -> None:
    """Has the loop meet the fault."""
    real, done = loop.train_step, []

    def train_step(run, stop, **options):
        if len(done) == steps:
            if kind == "data":
                _break_loader(run.loader)
            else:
                KINDS[kind]()
        done.append(run.step)
        return real(run, stop, **options)

    loop.train_step = train_step


def _kill_in_save(saves: int) -> None:
    """While it writes the checkpoint that follows so many, in the background."""
    real, done = saver._write_files, []

    def write_files(partial, texts, tensors):
        if len(done) == saves:
            KINDS["kill"]()
        done.append(partial)
        return real(partial, texts, tensors)

    saver._write_files = write_files


def _break_loader(loader) -> None:
    def fail(self):
        raise FileNotFoundError("shard 7 is missing; restore it")

    loader.__class__ = type("Broken", (type(loader),), {"__next__": fail})


def _be_impatient(seconds: float) -> None:
    peers.REPORT_SECONDS, peers.SILENT_SECONDS = seconds / 4, seconds
    peers.EARLY_SECONDS = 120 - seconds


if __name__ == "__main__":
    kind, rank, steps, *arguments = sys.argv[1:]
    if patience := os.environ.get("SPARSELLM_TEST_PATIENCE"):
        _be_impatient(float(patience))
    own_rank = os.environ.get("RANK", "0")
    if os.environ.get("SPARSELLM_TEST_DAMAGE") and own_rank == "1":
        damage(lambda step: step % 53 == 0)
        spoil(lambda step: step % 37 == 0)
    if kind == "differ":
        arguments += ["--set", "seed=1"] if own_rank == rank else []
    elif kind == "elsewhere":
        os.chdir(steps if own_rank == rank else ".")
    elif kind == "early-launcher":
        time.sleep(5)  # until both have begun
        if own_rank == rank:
            KINDS["launcher"]()
    elif kind == "kill-save" and own_rank == rank:
        _kill_in_save(int(steps))
    elif kind != "none" and own_rank == rank:
        inject(kind, int(steps))
    sys.exit(main(arguments))
