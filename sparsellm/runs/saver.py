"""Saves the checkpoints of a run in the background, through torch.distributed.checkpoint.

`Saver.begin` returns as soon as this rank's part of the tensors is copied to host memory; a thread
then writes it, and the coordinator publishes the checkpoint once all ranks have written theirs.
Tensors that every rank has whole are divided among the ranks; of a DTensor each rank writes its
shard.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from sparsellm.runs import checkpoint, folders
from sparsellm.runs.checkpoint import CheckpointError, Snapshot
from sparsellm.runs.files import fsync, warn, write_atomically
from sparsellm.runs.manifest import FileEntry, Manifest, read_manifest, write_hashed, write_manifest
from sparsellm.runs.storage import CheckpointWriter, engine_errors
from sparsellm.runs.tensor_files import Part, file_name, write_parts

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _HostStager(AsyncStager):
    """Copies a state dict to host memory, which is kept from one save to the next.

    The first save of a launch allocates that memory, pinned, while training waits: 10 s at 2B on
    one H200, 6 s on two, where later saves block for 0.5 s. A thread could not hide this: how much
    the copier allocates follows from the optimizer's tensors, which exist only after the first
    step; and by CUDA's programming guide no two streams run during an allocation of pinned memory,
    so that the steps meanwhile would wait.

    Before torch 2.13, torch's `DefaultStager` serves one save only: it closes the copier within
    `stage` (seen in 2.11), and the next `stage` fails.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._copier = StateDictStager(pin_memory=pinned, share_memory=False)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """The tensors in host memory; returns when the GPU has copied them."""
        staged = self._copier.stage(state_dict, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for, since `stage` waits."""

    def close(self) -> None:
        """Does nothing: torch calls it after every save. `release` frees the memory."""

    def release(self) -> None:
        """Frees the host memory; the stager cannot be used afterwards."""
        self._copier.close()


class Saver:
    """Saves one checkpoint at a time.

    Args:
        folder: folder of the checkpoints; created if missing.
        keep: number of newest checkpoints of the current branch to keep.
        ancestors: ids of the checkpoints that the run continues, the last one first.
        group: CPU process group used only for saving; None for one process.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ancestors: Sequence[str] = (),
        group: ProcessGroup | None = None,
    ) -> None:
        self.ancestors = list(ancestors)
        self._folder, self._keep, self._group = folder, keep, group
        self._rank = dist.get_rank(group) if group else 0
        self._world_size = dist.get_world_size(group) if group else 1
        # Pinned host memory that the GPU copies to: allocated by the first save and kept.
        self._stager = _HostStager(pinned=torch.cuda.is_available())
        self._pending: tuple[Path, Future[Any]] | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed; `wait` says why."""
        pending = self._pending
        return bool(pending and pending[1].done() and pending[1].exception() is not None)

    @property
    def finished(self) -> bool:
        """Whether `wait` would return a checkpoint at once."""
        return bool(self._pending and self._pending[1].done() and not self.failed)

    def begin(self, snapshot: Snapshot) -> None:
        """Starts to write ``step_…``; all ranks call it. Waits for the previous save first.

        The caller may change the tensors as soon as it returns.

        Raises:
            CheckpointError: the previous save has failed.
        """
        self.wait()
        texts, small = _texts(snapshot, self._rank), _small_tensors(snapshot, self._rank)
        final = self._folder / checkpoint.step_name(snapshot.step)
        skipped = int(snapshot.trainer.get("skipped_in_a_row", 0))
        partial = self._folder / f".tmp-{final.name}"
        writer = CheckpointWriter(
            partial,
            self._rank,
            self._world_size,
            prepare=lambda: folders.prepare(self._folder, partial),
            write_own=lambda: _write_small(partial, texts, small),
            publish=lambda files: self._publish(partial, final, snapshot.step, skipped, files),
        )
        with engine_errors():
            future = dcp.async_save(
                self._own_tensors(snapshot),
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=self._group,
                async_stager=self._stager,
                no_dist=self._group is None,
            )
        assert isinstance(future, Future)
        self._pending = final, future

    def wait(self) -> Path | None:
        """The checkpoint that was begun, once it is published; None if there is none to wait for.

        Raises:
            CheckpointError: some rank could not write (a full disk, say). What was written is
                removed, ``latest`` and the checkpoint that it names are untouched.
        """
        if self._pending is None:
            return None
        final, future = self._pending
        self._pending = None
        try:
            with engine_errors():
                future.result()
        except Exception as error:
            if self._rank == 0:
                folders.remove(self._folder / f".tmp-{final.name}")
            raise CheckpointError(_failure_message(self._folder, final, error)) from error
        return final

    def close(self) -> None:
        """Waits for the save in progress, whose failure is a warning here; frees its memory."""
        try:
            self.wait()
        except CheckpointError as error:
            warn(str(error))
        self._stager.release()

    def _own_tensors(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """The tensors that this rank copies and writes, by ``<kind>/<tensor>``."""
        tensors = {
            f"{kind}/{name}": tensor
            for kind, content in (
                (checkpoint.MODEL, snapshot.model),
                (checkpoint.OPTIMIZER, snapshot.optimizer),
            )
            for name, tensor in content.items()
        }
        owners = _share_out(tensors, self._world_size)
        return {
            name: t for name, t in tensors.items() if owners.get(name, self._rank) == self._rank
        }

    def _publish(
        self, partial: Path, final: Path, step: int, skipped: int, files: dict[str, FileEntry]
    ) -> None:
        folders.check_arrived(partial, files)
        manifest = Manifest(
            id=secrets.token_hex(8),
            ancestors=self.ancestors,
            step=step,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world_size=self._world_size,
            files=dict(sorted(files.items())),
        )
        write_manifest(partial, manifest)
        fsync(partial)
        folders.make_way(final)
        partial.rename(final)
        fsync(self._folder)
        write_atomically(self._folder / checkpoint.LATEST, final.name + "\n")
        self.ancestors = manifest.branch
        try:
            folders.prune(self._folder, manifest, self._keep, skipped)
        except OSError as error:  # what was to be saved is saved
            warn(f"an old checkpoint stays: {error}")


def save(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Writes ``folder/step_…`` from this process alone, and waits for it.

    It continues the newest checkpoint of the folder, if there is one.

    Raises:
        CheckpointError: as `Saver.wait`.
    """
    newest = checkpoint.latest(folder)
    manifest = read_manifest(newest, checkpoint.REMEDY) if newest else None
    saver = Saver(folder, keep, manifest.branch if manifest else ())
    saver.begin(snapshot)
    path = saver.wait()
    assert path is not None
    saver.close()
    return path


def _share_out(tensors: dict[str, Tensor], world_size: int) -> dict[str, int]:
    """Assigns each tensor that all ranks have whole to a rank, with about equal bytes per rank."""
    load = [0] * world_size
    owners = {}
    whole = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    for name in sorted(whole, key=lambda name: (-tensors[name].nbytes, name)):
        rank = load.index(min(load))
        owners[name] = rank
        load[rank] += tensors[name].nbytes
    return owners


def _texts(snapshot: Snapshot, rank: int) -> dict[str, str]:
    """Files by name: this rank's own, and from the first rank what is the same on all."""
    texts = {f"{checkpoint.rank_name(rank)}.json": _json(snapshot.rank.data)}
    if rank == 0:
        trainer = snapshot.trainer | {"format": checkpoint.FORMAT}
        texts |= {
            checkpoint.TRAINER_FILE: _json(trainer),
            checkpoint.RECIPE_FILE: snapshot.recipe_yaml,
        }
    return texts


def _small_tensors(snapshot: Snapshot, rank: int) -> dict[str, dict[str, Tensor]]:
    """Small tensors by the name of their file without its suffix; copies on the CPU."""
    kinds = {checkpoint.rank_name(rank): snapshot.rank.rng}
    if rank == 0:
        kinds[checkpoint.STATS] = snapshot.stats
        # An empty kind has a file too: an import has no optimizer state.
        large = {checkpoint.MODEL: snapshot.model, checkpoint.OPTIMIZER: snapshot.optimizer}
        kinds |= {kind: {} for kind, content in large.items() if not content}
    return {
        kind: {name: t.detach().to("cpu", copy=True) for name, t in content.items()}
        for kind, content in kinds.items()
    }


def _write_small(
    partial: Path, texts: dict[str, str], small: dict[str, dict[str, Tensor]]
) -> dict[str, FileEntry]:
    files = {file: write_hashed(partial / file, text) for file, text in texts.items()}
    for kind, tensors in small.items():
        file = file_name(kind, 0, 1)
        content = {name: Part(t, (0,) * t.dim()) for name, t in tensors.items()}
        files[file] = write_parts(partial / file, content)
    return files


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _failure_message(folder: Path, final: Path, failure: Exception) -> str:
    previous = checkpoint.latest(folder)
    kept = f"{previous} is intact" if previous else "there is no earlier checkpoint"
    who = "".join(f" ({note})" for note in getattr(failure, "__notes__", []))
    full = isinstance(failure, OSError) and failure.errno in _FULL
    remedy = "Free space" if full else "Fix that"
    return f"checkpoint {final} was not written: {failure}{who}; {kept}. {remedy} and start again"
