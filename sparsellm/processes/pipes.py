"""Ends a command by SIGPIPE, like any Unix tool, when the reader of its output (`head`, say) exits.

A Unix tool is killed by SIGPIPE, without a message. Python ignores that signal and raises
`BrokenPipeError` instead, from sockets and from pipes between its own processes too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Ends the process by SIGPIPE (exit code 141 to a shell) once its output has no reader."""
    try:
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # at exit Python would complain by itself
    except BrokenPipeError:
        if not reader_has_left():
            raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def reader_has_left() -> bool:
    """Whether standard output or error is a pipe that nobody can read any more."""
    return any(_has_no_reader(descriptor) for descriptor in (1, 2))


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
