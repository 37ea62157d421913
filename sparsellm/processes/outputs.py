"""Standard output and error that last: once nobody reads them, a `print` need not fail."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator

from typing_extensions import Buffer

_NO_READER = (errno.EPIPE, errno.EIO)  # of a pipe; of a terminal


@contextlib.contextmanager
def lasting_outputs(lose_reader: Callable[[], bool]) -> Iterator[None]:
    """Replaces standard output and error, unless they are closed or something else replaced them.

    Args:
        lose_reader: called by a `print` that nobody can read. If it returns True, that output goes
            nowhere from then on, else the `print` fails as usual.
    """
    streams = (("stdout", sys.__stdout__), ("stderr", sys.__stderr__))
    replaced = {name: s for name, s in streams if s is not None and s is getattr(sys, name)}
    for name, stream in replaced.items():
        stream.flush()
        setattr(sys, name, _lasting(stream, lose_reader))
    try:
        yield
    finally:
        for name, stream in replaced.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


def _lasting(stream: io.TextIOWrapper, lose_reader: Callable[[], bool]) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), lose_reader)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Output(io.FileIO):
    def __init__(self, descriptor: int, lose_reader: Callable[[], bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lose_reader = lose_reader

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_READER or not self._lose_reader():
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes
