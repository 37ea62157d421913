"""What a command line is checked for before anything is loaded."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


def positive_int(text: str) -> int:
    """A count, as argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: it is below 1, or no whole number.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def check_out(path: Path, *, is_folder: bool = False, option: str = "--out") -> None:
    """Whether an output can be written, asked before what may take hours is computed.

    Args:
        path: the file, or the folder; neither it nor the folders above need exist.
        is_folder: which of both.
        option: what names another one.

    Raises:
        ValueError: it cannot; says why.
    """
    place = path.absolute() if is_folder else path.absolute().parent
    existing = next(p for p in (place, *place.parents) if p.exists())
    if path.is_dir() and not is_folder:
        why = "it is a folder"
    elif not existing.is_dir():
        why = f"{existing} is no folder"
    elif reason := _why_not_writable(existing):
        why = reason
    else:
        return
    kind = "folder" if is_folder else "file"
    raise ValueError(f"{path} cannot be written ({why}); name another {kind}: {option}")


def _why_not_writable(folder: Path) -> str | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is write-protected"
    try:
        with tempfile.TemporaryFile(dir=folder):  # some file systems refuse what they seem to allow
            return None
    except OSError as error:
        return f"{folder} takes no files: {error.strerror}"
