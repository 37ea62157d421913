"""Checkpoints that a kill at any instant cannot damage.

``<run>/checkpoints/step_00000100/`` holds

- ``model.safetensors`` (Hugging Face's names, fp32) and ``optimizer.safetensors``; several ranks
  write their parts, ``model-00001-of-00008.safetensors`` and so on;
- ``stats.safetensors``, ``trainer.json``, ``recipe.yaml``;
- ``rank_00000.json`` and ``rank_00000.safetensors``: data position and random state of each rank;
- ``manifest.json``: every file with its hashes, the checkpoint's id and those of its ancestors.

A checkpoint is written beside (``.tmp-…``), fsynced, renamed, and only then named by the file
``latest``; older ones are pruned last. Nothing is pickled. Checkpoints of earlier versions, without
a manifest, are read too.

On several nodes the run folder must be on a file system that all of them share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm.data import position
from sparsellm.runs.files import TrainerState, read_json, read_model, read_tensors
from sparsellm.runs.manifest import MANIFEST_FILE, Manifest, files_like, read_manifest, verify
from sparsellm.runs.storage import CheckpointReader, load_tensors
from sparsellm.runs.tensor_files import files_of
from sparsellm.strict import validate

LATEST = "latest"
ABANDONED = "abandoned"  # folder of a run, see history.py
MODEL, OPTIMIZER, STATS = "model", "optimizer", "stats"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATS_FILE = "stats.safetensors"
TRAINER_FILE = "trainer.json"
RECIPE_FILE = "recipe.yaml"
# The "format" in trainer.json; since 2 there is a manifest.
FORMAT = 2
STEP_FOLDERS = "step_" + "[0-9]" * 8  # matches no copy by another name
_NAME = re.compile(r"step_[\w.-]{1,100}")  # in `latest`: no path that leads elsewhere
REMEDY = "resume from an older checkpoint"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the previous one is intact."""


@dataclass(frozen=True)
class RankState:
    """The state that each rank has of its own."""

    data: dict[str, Any]
    rng: dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Everything that a resumed run needs; tensors are whole on all ranks, or DTensors."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    stats: dict[str, Tensor]
    trainer: dict[str, Any]
    recipe_yaml: str
    rank: RankState


@dataclass(frozen=True)
class SavedState:
    """A verified checkpoint, without its large tensors, which `read_kind` reads."""

    path: Path
    step: int
    trainer: dict[str, Any]
    recipe_yaml: str
    rank: RankState  # empty for a rank that did not exist when it was saved
    has_optimizer: bool  # False for an imported checkpoint
    manifest: Manifest | None  # None for one of an earlier version


def rank_name(rank: int) -> str:
    """The name of a rank's two files, without their suffix."""
    return f"rank_{rank:05d}"


def replaced_name(final: Path) -> Path:
    """Where a checkpoint is kept while another one of the same step replaces it."""
    return final.with_name(f".tmp-replaced-{final.name}")


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints by step, without links and partial ones."""
    return [path for _, path in steps_in(folder)]


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """As `checkpoints_in`, with their steps; a copy by another name comes before its original."""
    found = [(complete_step(path), path) for path in folder.glob(STEP_FOLDERS)]
    whole = [(step, path) for step, path in found if step is not None and not path.is_symlink()]
    return sorted(whole, key=lambda item: (item[0], item[1].name == step_name(item[0]), item[1]))


def complete_step(path: Path) -> int | None:
    """The step of a checkpoint, whatever its folder is called; None where it is not complete.

    It is complete if all its files exist with the right size; their content is not read.
    """
    try:
        manifest = read_manifest(path, REMEDY)
        if manifest is None:  # of an earlier version, or made by hand
            return int(read_model(path / TRAINER_FILE, TrainerState, REMEDY)["step"])
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (ValueError, OSError):
        return None
    whole = all(sizes[name] == entry.size for name, entry in manifest.files.items())
    return manifest.step if whole else None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, which may be damaged."""
    return any((path / name).is_file() for name in (TRAINER_FILE, MANIFEST_FILE))


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` names, else the newest complete one."""
    pointer = folder / LATEST
    if pointer.is_file():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        named = folder / name
        # A kill between the two renames of publishing leaves the replaced one alone.
        for candidate in (named, replaced_name(named)) if _NAME.fullmatch(name) else ():
            if candidate.is_dir():
                return candidate
    return next(reversed(checkpoints_in(folder)), None)


def data_states(path: Path) -> list[dict[str, Any]]:
    """The data positions of all ranks that saved a checkpoint."""
    return [read_position(file) for file in files_like(path, "rank_*.json", REMEDY)]


def read_position(path: Path) -> dict[str, Any]:
    """The data position of one rank, from its ``rank_….json``.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged; names it, the line and key.
    """
    content = read_json(path, REMEDY)
    # Positions of earlier versions have other keys, which `merge` reports.
    if content.get("format") == position.FORMAT:
        validate(position.SavedPosition, content, path, remedy=REMEDY)
    return content


def load(path: Path, rank: int = 0, world_size: int = 1) -> SavedState:
    """Reads what one rank needs of a checkpoint, without its large tensors.

    Verifies the files' hashes; each of ``world_size`` ranks verifies its share.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        ValueError: a file is truncated or damaged; the message offers an older checkpoint.
    """
    with _offering_older(path):
        if not (path / TRAINER_FILE).is_file():
            raise FileNotFoundError(f"{path} is not a checkpoint: it has no {TRAINER_FILE}")
        return _load(path, rank, world_size)


def identity(path: Path) -> str:
    """A name that is the same on all ranks that see the same checkpoint.

    Raises:
        ValueError: the manifest is damaged; the message offers an older checkpoint.
    """
    with _offering_older(path):
        manifest = read_manifest(path, REMEDY)
    return path.name if manifest is None else f"{path.name} ({manifest.id})"


@contextmanager
def _offering_older(path: Path) -> Iterator[None]:
    """Adds to an error of reading ``path`` which older checkpoint is whole."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        older = _older_whole(path)
        if older is None:
            raise
        raise type(error)(
            f"{error}: {older} is whole and the newest before it; add --resume {older}"
        ) from error


def _load(path: Path, rank: int, world_size: int) -> SavedState:
    manifest = _manifest(path, REMEDY)
    if manifest is not None:
        # Every rank reads the small files; each verifies its share of all others.
        own = [TRAINER_FILE, RECIPE_FILE, *sorted(manifest.files)[rank::world_size]]
        verify(path, manifest, dict.fromkeys(own), REMEDY)
    trainer = read_model(path / TRAINER_FILE, TrainerState, REMEDY)
    data_file = path / f"{rank_name(rank)}.json"
    has_rank = data_file in files_like(path, data_file.name, REMEDY)
    rank_state = RankState(
        data=read_position(data_file) if has_rank else {},
        rng=read_tensors(data_file.with_suffix(".safetensors"), REMEDY) if has_rank else {},
    )
    kinds = (MODEL, OPTIMIZER, STATS)
    names = {kind: CheckpointReader(path, [kind], REMEDY).shapes() for kind in kinds}
    return SavedState(
        path=path,
        step=int(trainer["step"]),
        trainer=trainer,
        recipe_yaml=(path / RECIPE_FILE).read_text(encoding="utf-8"),
        rank=rank_state,
        manifest=manifest,
        has_optimizer=bool(names[OPTIMIZER]),
    )


def _manifest(path: Path, remedy: str) -> Manifest | None:
    manifest = read_manifest(path, remedy)
    if manifest is None and _format(path / TRAINER_FILE, remedy) >= FORMAT:
        raise FileNotFoundError(f"{path / MANIFEST_FILE} is missing; {remedy}")
    return manifest


def _format(trainer_file: Path, remedy: str) -> int:
    return int(read_model(trainer_file, TrainerState, remedy).get("format", 1))


def _older_whole(path: Path) -> Path | None:
    """The newest earlier checkpoint that passes verification."""
    try:
        manifest = read_manifest(path, REMEDY)
    except ValueError:
        manifest = None
    number = re.search(r"step_(\d+)", path.name)
    limit = manifest.step if manifest else int(number[1]) if number else -1
    for step, older in reversed(steps_in(path.parent)):
        if step > limit or older == path:
            continue
        try:
            _load(older, 0, 1)
        except (FileNotFoundError, ValueError):
            continue
        return older
    return None


def check_files(path: Path, names: list[str], remedy: str = REMEDY) -> None:
    """Verifies some files of a checkpoint, if it has a manifest.

    Raises:
        FileNotFoundError, ValueError: one is missing or damaged.
    """
    manifest = _manifest(path, remedy)
    if manifest is not None:
        verify(path, manifest, names, remedy)


def has_kind(path: Path, kind: str) -> bool:
    """Whether a checkpoint has tensors of a kind."""
    return bool(files_of(path, kind, REMEDY))


def read_kind(path: Path, kind: str, remedy: str = REMEDY) -> dict[str, Tensor]:
    """The whole tensors of a kind, verified and on the CPU.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is damaged.
    """
    check_files(path, [file.name for file in files_of(path, kind, remedy)], remedy)
    reader = CheckpointReader(path, [kind], remedy)
    shapes = reader.shapes()
    wholes = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    load_tensors(wholes, reader)
    return {name.partition("/")[2]: tensor for name, tensor in wholes.items()}
