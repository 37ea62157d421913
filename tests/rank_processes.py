"""The processes of training runs on this machine, found by a word of their command line."""

import contextlib
import time

import psutil

from sparsellm.runs.lock import lives

LAUNCHER = "accelerate.commands.launch"


def ranks_of(word: str) -> list[psutil.Process]:
    """The processes that train, of all launches that have ``word`` on their command line.

    The word is one whole argument, such as ``name=soak`` or ``logging.run_dir=/tmp/runs``. Helpers
    of a rank (data workers, compilers) are none: they have other arguments, or, where they were
    forked, those of their parent.
    """
    processes = []
    for process in processes_with(word):
        with contextlib.suppress(psutil.Error):
            words, parent = process.cmdline(), process.parent()
            if LAUNCHER not in words and (parent is None or parent.cmdline() != words):
                processes.append(process)
    return processes


def processes_with(word: str) -> list[psutil.Process]:
    """All processes, launchers too, that have ``word`` on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if word in (process.info["cmdline"] or [])
    ]


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still alive after so many seconds; nobody need have waited for the others."""
    end = time.monotonic() + seconds
    while (left := [process for process in processes if lives(process)]) and (
        time.monotonic() < end
    ):
        time.sleep(0.02)
    return left
