"""Small files and tensor files of a run: written durably, read with damage named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_REMEDY = "resume from an older checkpoint"


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file such that a reader, or a kill, sees the old or the new one."""
    partial = path.with_name(f".tmp-{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        fsync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes a file or folder durable: after a power failure it is as it is now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, remedy: str = _REMEDY) -> dict[str, Any]:
    """A JSON object; a missing or damaged file is named, with the remedy."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from error


def read_tensors(path: Path, remedy: str = _REMEDY) -> dict[str, Tensor]:
    """A safetensors file; a missing or damaged one is named, with the remedy."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise damaged(path, error, remedy) from error


def damaged(path: Path, reason: object, remedy: str) -> ValueError:
    """The error for a file that is not what was written."""
    return ValueError(f"{path} is truncated or damaged ({reason}); {remedy}")
