"""Small files and tensor files of a run: durable once written; errors name a damaged one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from safetensors import SafetensorError

from sparsellm.recipe.strict import damaged, parse_json, read_text, validate

if TYPE_CHECKING:
    from torch import Tensor

RECIPE_FILE = "recipe.yaml"  # in a run's folder and in each of its checkpoints
SWEEP_FILE = "sweep.json"  # in a sweep's folder
SAMPLE_FILE = "sample.json"  # text that a run's model wrote when training ended


def free_path(stem: Path, suffix: str = "") -> Path:
    """``stem.1`` with the suffix, or the next number that no file or folder has."""
    paths = (Path(f"{stem}.{i}{suffix}") for i in itertools.count(1))
    return next(path for path in paths if not path.exists())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write, whose file then takes the place of ``path``.

    Readers see the old or the new file, also after a kill.

    Raises:
        OSError: it cannot be written, as on a full disk; names the file.
    """
    partial = path.with_name(f".tmp-{path.name}")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file; see `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Makes a file or folder durable, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path, model: type[BaseModel], remedy: str) -> list[dict[str, Any]]:
    """The objects of a file that has one on each line; empty lines do not count.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an object is not a ``model``; the message names file, line and key.
    """
    lines = read_text(path, remedy).split("\n")  # `splitlines` would split in texts
    objects = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            source = f"{path}, line {number}"
            objects.append(parse_json(line, source, remedy))
            validate(model, objects[-1], source, remedy=remedy)
    return objects


def read_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Reads a safetensors file; if it is missing or damaged, the error has the remedy."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    from safetensors.torch import load_file  # torch: `sparsellm stop` answers sooner without it

    try:
        return load_file(path)
    except SafetensorError as error:
        raise damaged(path, error, remedy) from error
