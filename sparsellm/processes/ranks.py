"""What a rank knows before torch is imported: its launcher, and which rank reports errors.

A launcher (`accelerate launch`, torchrun) starts a process per rank and gives each a file for its
error (``TORCHELASTIC_ERROR_FILE``), in a folder per launch, node and attempt.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
_POLL_SECONDS = 1.0
_PARENT = os.getppid()  # as early as can be: a launcher that dies during imports is noticed too


class EndedByAnother(RuntimeError):
    """This rank ends because of an error of another rank, which reports it."""

    def __init__(self) -> None:
        super().__init__("another rank failed")


def several() -> bool:
    """Whether this process is one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Whether this process is the main rank; also true without a launcher."""
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def watch_launcher() -> None:
    """Ends this process, from now on, as soon as the launcher that started it is gone.

    Called first thing: while ranks are still looking for one another, nothing else ends them for
    minutes. A process without a launcher is left alone.
    """
    if any(name in os.environ for name in _LAUNCHED_BY):
        threading.Thread(target=_end_with_launcher, daemon=True).start()


def _end_with_launcher() -> None:
    while os.getppid() == _PARENT:
        time.sleep(_POLL_SECONDS)
    end_once("the launcher of this rank has died, so the rank ends; start it again")


def first_to_speak() -> bool:
    """Whether this rank is the first of its launch and node to report an error; true only once."""
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if not error_file:
        return True
    claim = Path(error_file).parent.parent / "sparsellm-error"
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def tell(message: str) -> None:
    """Prints this rank's error and passes it to the launcher, which names it as the root cause."""
    _write_error_file(message, time.time())
    try:
        print(message, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise  # its reader has left, and so does the command
    except OSError:
        pass  # a log on a disk that is full


def _write_error_file(message: str, when: float) -> None:
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file:
        content = {"message": message, "extraInfo": {"timestamp": str(int(when))}}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": content}), encoding="utf-8")


def follow() -> NoReturn:
    """Ends this process because another rank failed."""
    # The launcher takes the earliest failure for the cause, by whole seconds.
    _write_error_file("ended because another rank failed", time.time() + 60)
    leave(1)


def end_with(message: str) -> NoReturn:
    """Ends the process, from any of its threads, with an error that may have no reader."""
    with contextlib.suppress(BrokenPipeError):
        tell(f"error: {message}")
    leave(1)


def end_once(message: str) -> NoReturn:
    """As `end_with`, but silently if another rank of this launch and node has reported an error."""
    if first_to_speak():
        end_with(message)
    leave(1)


def leave(status: int) -> NoReturn:
    """Ends the process at once: Python's normal exit would wait for collectives forever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
