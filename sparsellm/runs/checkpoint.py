"""Checkpoints that a kill at any instant cannot damage.

``<run>/checkpoints/step_00000100/`` holds

- ``model.safetensors`` (Hugging Face's names, fp32) and ``optimizer.safetensors``; several ranks
  write their parts, ``model-00001-of-00008.safetensors`` and so on;
- ``stats.safetensors``, ``trainer.json``, ``recipe.yaml``;
- ``tokenizer/`` and ``source/``, files of Hugging Face folders (hf_files.py);
- ``rank_00000.json`` and ``rank_00000.safetensors``: data position and random state of each rank;
- ``manifest.json``: every file with its hashes, the checkpoint's id and those of its ancestors.

A checkpoint is written under another name (``.tmp-…``), fsynced, renamed, and only then named by
the file ``latest``; older ones are pruned last. Nothing is pickled.

On several nodes the run folder must be on a file system that all of them share. Only what reads or
writes tensors imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsellm.recipe.strict import read_json
from sparsellm.runs.files import RECIPE_FILE, read_tensors
from sparsellm.runs.manifest import (
    MANIFEST_FILE,
    REMEDY,
    Manifest,
    files_like,
    read_manifest,
    verify,
)

if TYPE_CHECKING:
    from torch import Tensor

LATEST = "latest"
MODEL, OPTIMIZER, STATS = "model", "optimizer", "stats"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"
FORMAT = 2  # in trainer.json
_STEP_NAMES = "step_" + "[0-9]" * 8
_NAME = re.compile(r"step_[\w.-]{1,100}")  # in `latest`: no path that leads elsewhere

Result = TypeVar("Result")


class CheckpointError(OSError):
    """A checkpoint could not be written; the previous one is intact."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that a resumed run needs; tensors are whole on all ranks, or DTensors.

    A snapshot of weights alone, as of an import, cannot be resumed.
    """

    step: int  # optimizer steps done
    model: dict[str, Tensor]
    trainer: dict[str, Any]
    recipe_yaml: str
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # position of this rank in the data
    rng: dict[str, Tensor] = field(default_factory=dict)  # random state of this rank
    files: dict[str, bytes] = field(default_factory=dict)  # from elsewhere, see hf_files.py


@dataclass(frozen=True)
class SavedState:
    """A verified checkpoint, without its large tensors, which `read_kind` reads."""

    manifest: Manifest
    trainer: dict[str, Any]
    rng: dict[str, Tensor]  # empty for a rank that did not exist when it was saved

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def rank_name(rank: int) -> str:
    """The name of a rank's two files, without their suffix."""
    return f"rank_{rank:05d}"


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step that a `step_name` states."""
    return int(path.name.removeprefix("step_"))


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints by step, without links and copies by other names."""
    named = sorted(path for path in folder.glob(_STEP_NAMES) if not path.is_symlink())
    return [path for path in named if complete_step(path) == step_of(path)]


def complete_step(path: Path) -> int | None:
    """The step of a checkpoint, whatever its folder is called; None where it is not complete.

    It is complete if all its files exist with the right size; their content is not read.
    """
    try:
        manifest = read_manifest(path)
        whole = all((path / n).stat().st_size == file.size for n, file in manifest.files.items())
    except (ValueError, OSError):
        return None
    return manifest.step if whole else None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, which may be damaged."""
    return any((path / name).is_file() for name in (TRAINER_FILE, MANIFEST_FILE))


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` names, else the newest complete one."""
    pointer = folder / LATEST
    if pointer.is_file():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        if _NAME.fullmatch(name) and (folder / name).is_dir():
            return folder / name
    return next(reversed(checkpoints_in(folder)), None)


def checkpoint_at(path: Path) -> Path | None:
    """The checkpoint that a path is or, of a run or its checkpoints' folder, the latest; if any."""
    if is_checkpoint(path):
        return path
    folders = [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
    return next(filter(None, map(latest, folders)), None)


def read_newest(find: Callable[[], Path], read: Callable[[Path], Result]) -> Result:
    """Returns ``read`` of the checkpoint that ``find`` returns.

    A run that trains may prune it meanwhile; then ``find`` is asked again.
    """
    before = None
    while True:
        path = find()
        try:
            return read(path)
        except (OSError, ValueError):
            if path.exists() or path == before:
                raise
            before = path


def data_states(path: Path) -> list[dict[str, Any]]:
    """The data positions of all ranks that saved a checkpoint."""
    return [read_json(file, REMEDY) for file in files_like(path, "rank_*.json")]


def read_trainer(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``trainer.json``.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged.
    """
    verify(path, [TRAINER_FILE])
    return read_json(path / TRAINER_FILE, REMEDY)


def load(path: Path, rank: int = 0, world_size: int = 1) -> SavedState:
    """Reads what one rank needs of a checkpoint, without its large tensors.

    Verifies the files' hashes; each of ``world_size`` ranks verifies its share.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        ValueError: a file is truncated or damaged; the message offers an older checkpoint.
    """
    with _offering_older(path):
        return _load(path, rank, world_size)


def check_texts(path: Path) -> None:
    """Verifies what is read of a checkpoint before torch is loaded: its recipe and its counts.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    with _offering_older(path):
        verify(path, [TRAINER_FILE, RECIPE_FILE])


def identity(path: Path) -> str:
    """A name that is the same on all ranks that see the same checkpoint.

    Raises:
        FileNotFoundError, ValueError: the manifest is missing or damaged; the message offers an
            older checkpoint.
    """
    with _offering_older(path):
        return f"{path.name} ({read_manifest(path).id})"


@contextmanager
def _offering_older(path: Path) -> Iterator[None]:
    """Adds to an error of reading ``path`` the newest older checkpoint that is whole."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        number = re.search(r"step_(\d+)", path.name)
        limit = int(number[1]) if number else -1
        with suppress(FileNotFoundError, ValueError):
            limit = read_manifest(path).step
        for older in reversed(checkpoints_in(path.parent)):
            if step_of(older) > limit or older == path:
                continue
            try:
                _load(older, 0, 1)
            except (FileNotFoundError, ValueError):
                continue
            raise type(error)(
                f"{error}: {older} is the newest complete checkpoint before it. "
                f"Move {path.name} elsewhere, "
                "and the same command resumes from that one; or begin a new run with --resume "
                f"{older} --set name=NEW"
            ) from error
        raise


def _load(path: Path, rank: int, world_size: int) -> SavedState:
    manifest = read_manifest(path)
    # Every rank reads the small files; each verifies its share of all others.
    names = [TRAINER_FILE, RECIPE_FILE, *sorted(manifest.files)[rank::world_size]]
    verify(path, dict.fromkeys(names))
    rng_file = path / f"{rank_name(rank)}.safetensors"
    return SavedState(
        manifest=manifest,
        trainer=read_json(path / TRAINER_FILE, REMEDY),
        rng=read_tensors(rng_file, REMEDY) if rng_file.name in manifest.files else {},
    )


def read_kind(path: Path, kind: str) -> dict[str, Tensor]:
    """The whole tensors of a kind, verified and on the CPU.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is damaged.
    """
    import torch

    from sparsellm.runs.tensor_files import StoredTensors, files_of

    verify(path, [file.name for file in files_of(path, kind)])
    stored = StoredTensors(path, kind)
    wholes = {name: torch.empty_like(t, device="cpu") for name, t in stored.empty().items()}
    stored.read(wholes)
    return wholes


def read_stats(path: Path) -> dict[str, Tensor]:
    """The statistics of a checkpoint; empty if it has none.

    Raises:
        FileNotFoundError, ValueError: a file of the checkpoint is missing or damaged.
    """
    return read_kind(path, STATS) if files_like(path, f"{STATS}*.safetensors") else {}
