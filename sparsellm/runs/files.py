"""Small files and tensor files of a run: written durably, read with damage named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparsellm.strict import parse_json, validate

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
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error, remedy) from error
    return parse_json(text, str(path), remedy)


def read_model(path: Path, model: type[BaseModel], remedy: str = _REMEDY) -> dict[str, Any]:
    """As `read_json`, an object whose keys are those of ``model``, which names one that is not."""
    content = read_json(path, remedy)
    try:
        validate(model, content, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    return content


class TrainerState(BaseModel):
    """What every reader of a ``trainer.json`` relies on."""

    model_config = ConfigDict(extra="allow")

    step: NonNegativeInt
    tokens: NonNegativeInt = 0


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
