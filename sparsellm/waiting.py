"""What is printed: any text anywhere, warnings, and progress messages during long operations."""

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

QUIET_SECONDS = 2.0  # an operation that ends earlier is not mentioned
REPEAT_SECONDS = 15.0
TICK_SECONDS = 1.0  # on a terminal


def allow_any_text() -> None:
    """Escapes characters that stdout or stderr cannot encode, such as λ, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether stderr is a terminal; a process may have been started without any."""
    return sys.stderr is not None and sys.stderr.isatty()


def rewrite(text: str) -> None:
    """Shows one line if stderr is a terminal; whatever is printed next replaces it."""
    if not on_terminal():
        return
    width = shutil.get_terminal_size().columns - 1
    print(f"\r{text[:width]:{width}}\r", end="", file=sys.stderr, flush=True)


@contextmanager
def waiting(activity: str, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Says that ``activity`` is in progress, and at the end how long it took.

    On a terminal the seconds are counted in place; elsewhere a line is printed every 15 seconds.

    Args:
        activity: such as ``compiling the model``.
        say: prints a line, by default to stderr; called from another thread. If it is given, lines
            are printed on a terminal too, and nothing is counted in place.
    """
    in_place = say is None and on_terminal()
    say = say or partial(print, file=sys.stderr, flush=True)
    show = rewrite if in_place else say
    began, over = time.monotonic(), threading.Event()

    def watch() -> None:
        if over.wait(QUIET_SECONDS):
            return
        with suppress(BrokenPipeError):  # the main thread meets it too, and ends the process
            show(f"{activity} …")
            while not over.wait(TICK_SECONDS if in_place else REPEAT_SECONDS):
                show(f"{activity} … {time.monotonic() - began:.0f} s")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        if in_place:
            with suppress(BrokenPipeError):
                rewrite("")
    seconds = time.monotonic() - began
    if seconds > QUIET_SECONDS:
        say(f"{activity}: {seconds:.0f} s")
