"""Progress messages during long operations."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

QUIET_SECONDS = 2.0  # what is over by then is not mentioned
REPEAT_SECONDS = 15.0


@contextmanager
def waiting(what: str, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Prints every 15 seconds that ``what`` is in progress, and at the end how long it took.

    Args:
        what: such as ``compiling the model``.
        say: prints a line, by default to stderr; called from another thread.
    """
    say = say or partial(print, file=sys.stderr, flush=True)
    began, over = time.monotonic(), threading.Event()

    def watch() -> None:
        if over.wait(QUIET_SECONDS):
            return
        with suppress(BrokenPipeError):  # the main thread meets it too, and ends the process
            say(f"{what} …")
            while not over.wait(REPEAT_SECONDS):
                say(f"{what} … {time.monotonic() - began:.0f} s")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    seconds = time.monotonic() - began
    if seconds > QUIET_SECONDS:
        say(f"{what}: {seconds:.0f} s")
