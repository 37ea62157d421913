"""`accelerate launch` whose ranks begin with torch imported: ``warm_launch.py NUMBER ARGUMENT…``.

It is a program for warm.py. Its ranks are forked before it has threads, and wait; where torchrun
would start a process, one of them becomes the program. They are the launcher's children, each in a
session of its own, as torchrun's are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from warm_server import become


class Rank:
    """What torchrun uses of `subprocess.Popen`."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        reader, writer = os.pipe()
        self.pid = os.fork()
        self.request = os.fdopen(writer if self.pid else reader, "w" if self.pid else "r")
        os.close(reader if self.pid else writer)

    def start(self, words: tuple[str, ...], env: dict[str, str]) -> Rank:
        """Has it run a program."""
        self.request.write(json.dumps([words, env]) + "\n")
        self.request.close()
        return self

    def poll(self) -> int | None:
        """As of `subprocess.Popen`."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Likewise."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return status


def _launch(arguments: list[str], ranks: list[Rank]) -> None:
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    def start(handler: object, words: tuple[str, ...], env: dict[str, str]) -> Rank:
        assert words[:2] == (sys.executable, "-u"), words
        return ranks.pop(0).start(words[2:], env)

    subprocess_handler.SubprocessHandler._popen = start
    sys.argv = ["launch", *arguments]
    launch.main()


def _main(number: int, arguments: list[str]) -> None:
    ranks = []
    for _ in range(number):
        rank = Rank()
        if rank.pid == 0:
            os.setsid()
            if request_line := rank.request.readline():  # nothing, if the launcher ended before
                become(*json.loads(request_line))
            return
        ranks.append(rank)
    _launch(arguments, ranks)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
