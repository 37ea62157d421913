"""Checkpoints that a kill at any instant cannot damage.

``<run>/checkpoints/step_00000100/`` holds ``model.safetensors`` (Hugging Face's names, fp32),
``optimizer.safetensors``, ``stats.safetensors``, ``trainer.json``, ``recipe.yaml`` and for each
rank its data position and RNG. A checkpoint is written beside (``.tmp-…``), fsynced, renamed, and
only then named by the file ``latest``; older ones are pruned last. Nothing is pickled.

On several nodes the run folder must be on a file system that all of them share.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparsellm.runs.files import fsync, read_json, read_tensors, write_atomically

LATEST = "latest"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATS_FILE = "stats.safetensors"
TRAINER_FILE = "trainer.json"
RECIPE_FILE = "recipe.yaml"
_STEP_FOLDERS = "step_" + "[0-9]" * 8  # and not a copy that somebody put beside them


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the previous one is intact."""


@dataclass(frozen=True)
class RankState:
    """What differs from rank to rank."""

    data: dict[str, Any]
    rng: dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Everything that a resumed run needs. The tensors of rank 0 alone are written."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    stats: dict[str, Tensor]
    trainer: dict[str, Any]
    recipe_yaml: str
    rank: RankState


@dataclass(frozen=True)
class Ranks:
    """The collectives that saving needs."""

    rank: int
    is_main: bool
    any_failed: Callable[[bool], bool]  # also a barrier


def save(folder: Path, snapshot: Snapshot, ranks: Ranks, keep: int) -> Path:
    """Writes ``folder/step_…`` from all ranks together and prunes to the newest ``keep``.

    Raises:
        CheckpointError: some rank could not write (a full disk, say). What was written is
            removed, ``latest`` and the checkpoint that it names are untouched.
    """
    final = folder / f"step_{snapshot.step:08d}"
    partial = folder / f".tmp-{final.name}"
    failure: OSError | None = None

    def attempt(action: Callable[[], None]) -> None:
        nonlocal failure
        if failure is None:
            try:
                action()
            except OSError as error:
                failure = error
        if ranks.any_failed(failure is not None):
            if ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(_failure_message(folder, final, failure)) from failure

    attempt(lambda: _clear_partial(folder, partial) if ranks.is_main else None)
    attempt(lambda: _write(partial, snapshot, ranks))
    attempt(lambda: _publish(folder, partial, final, keep) if ranks.is_main else None)
    return final


def _failure_message(folder: Path, final: Path, failure: OSError | None) -> str:
    cause = f"{failure}" if failure else "another rank could not write (its log says why)"
    previous = latest(folder)
    kept = f"{previous} is intact" if previous else "there is no earlier checkpoint"
    return f"checkpoint {final} was not written: {cause}; {kept}. Free space and start again"


def _clear_partial(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".tmp-step_*"):  # of a run that was killed while it wrote
        shutil.rmtree(stale)
    partial.mkdir()


def _write(partial: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    name = f"rank_{ranks.rank:05d}"
    _write_json(partial / f"{name}.json", snapshot.rank.data)
    _write_tensors(partial / f"{name}.safetensors", snapshot.rank.rng)
    if ranks.is_main:
        _write_tensors(partial / MODEL_FILE, snapshot.model)
        _write_tensors(partial / OPTIMIZER_FILE, snapshot.optimizer)
        _write_tensors(partial / STATS_FILE, snapshot.stats)
        _write_json(partial / TRAINER_FILE, snapshot.trainer)
        (partial / RECIPE_FILE).write_text(snapshot.recipe_yaml, encoding="utf-8")
        fsync(partial / RECIPE_FILE)


def _publish(folder: Path, partial: Path, final: Path, keep: int) -> None:
    fsync(partial)
    if final.exists():  # the run was resumed from before this step
        final.rename(_replaced(final))
    partial.rename(final)
    fsync(folder)
    write_atomically(folder / LATEST, final.name + "\n")
    try:
        _prune(folder, final, keep)
    except OSError as error:  # what was to be saved is saved
        print(f"warning: an old checkpoint stays: {error}", file=sys.stderr, flush=True)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    for old in sorted(folder.glob(_STEP_FOLDERS))[:-keep]:
        if old != newest:
            # Renamed first: a kill while deleting leaves no half a checkpoint of that name.
            old.rename(folder / f".tmp-pruned-{old.name}")
    for doomed in [*folder.glob(".tmp-pruned-*"), *folder.glob(".tmp-replaced-*")]:
        shutil.rmtree(doomed)


def _replaced(final: Path) -> Path:
    return final.with_name(f".tmp-replaced-{final.name}")


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` names, else the newest complete one."""
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text(encoding="utf-8").strip()
        # A kill between the two renames of `_publish` leaves the replaced one alone.
        for candidate in (named, _replaced(named)):
            if candidate.is_dir() and candidate != folder:
                return candidate
    return max(folder.glob(_STEP_FOLDERS), default=None)


def data_states(path: Path) -> list[dict[str, Any]]:
    """The data positions of all ranks that a checkpoint was saved by."""
    return [read_json(file) for file in sorted(path.glob("rank_*.json"))]


def load(path: Path, rank: int) -> Snapshot:
    """Reads one rank's view of a checkpoint, on the CPU; every rank reads the shared tensors.

    A rank that did not exist when it was saved gets an empty `RankState`.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated or corrupt.
    """
    if not (path / TRAINER_FILE).is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {TRAINER_FILE}")
    trainer = read_json(path / TRAINER_FILE)
    name = f"rank_{rank:05d}"
    has_rank = (path / f"{name}.json").is_file()
    rank_state = RankState(
        data=read_json(path / f"{name}.json") if has_rank else {},
        rng=read_tensors(path / f"{name}.safetensors") if has_rank else {},
    )
    return Snapshot(
        step=int(trainer["step"]),
        model=read_tensors(path / MODEL_FILE),
        optimizer=read_tensors(path / OPTIMIZER_FILE),
        stats=read_tensors(path / STATS_FILE),
        trainer=trainer,
        recipe_yaml=(path / RECIPE_FILE).read_text(encoding="utf-8"),
        rank=rank_state,
    )


# --- files ---------------------------------------------------------------------------------------


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fsync(path)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it reports a full disk as its own error
        raise OSError(str(error)) from error
    fsync(path)
