"""Kills a process at every file operation while it saves: ``killed_writer.py FOLDER``.

For n = 1, 2, … a child that goes on from one checkpoint saves two more, in the background as
training does, and is killed (SIGKILL) right before its n-th operation below FOLDER: opening,
renaming, making or deleting a file or folder. Another child then finds what a resumed run would,
and saves again. Ends where a child was not killed; prints how many were.
"""

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from runs.test_checkpoint import _snapshot
from sparsellm.runs import checkpoint, saver

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def _die_at(number: int, folder: Path) -> None:
    met = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            met.append(event)
            if len(met) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _write(folder: Path, number: int) -> None:
    keeper = saver.Saver(folder, keep=1)
    keeper.begin(_snapshot(1))
    keeper.wait()
    _die_at(number, folder)
    for step in (2, 3):
        keeper.begin(_snapshot(step))
    keeper.wait()


def _check(folder: Path) -> None:
    path = checkpoint.latest(folder)
    assert path is not None
    loaded = checkpoint.load(path)
    assert loaded.step in (1, 2, 3)
    for kind, value in (("model", loaded.step), ("optimizer", loaded.step + 0.5)):
        [tensor] = checkpoint.read_kind(path, kind).values()
        assert torch.equal(tensor, torch.full((8,), float(value)))
    # As a resumed run would save them: those that were published, but not named yet, are set aside.
    for step in range(loaded.step + 1, 5):
        saver.save(folder, _snapshot(step), keep=1)
    names = {p.name for p in folder.iterdir() if p.suffix != ".stray"}
    assert names == {"latest", "step_00000004"}


def _in_child(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _killed(folder: Path, number: int) -> bool:
    """Whether the first child was, at its ``number``-th operation; the second one checks."""
    folder.mkdir()
    status = _in_child(lambda: _write(folder, number))
    assert status in (0, -signal.SIGKILL), status
    assert _in_child(lambda: _check(folder)) == 0, f"killed at operation {number}"
    shutil.rmtree(folder)
    return status == -signal.SIGKILL


def main(root: Path) -> None:
    torch.set_num_threads(1)
    numbers = itertools.takewhile(lambda n: _killed(root / str(n), n), itertools.count(1))
    print(len(list(numbers)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
