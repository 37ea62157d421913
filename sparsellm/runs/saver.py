"""Saves the checkpoints of a run in the background.

`Saver.begin` returns as soon as this rank's part of the tensors is copied to host memory; a thread
then writes it, and the first rank publishes the checkpoint once all ranks have written theirs.
Tensors that every rank has whole are divided among the ranks; of a DTensor each rank writes its
shard.
"""

import errno
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from sparsellm.runs import checkpoint, folders
from sparsellm.runs.checkpoint import CheckpointError, Snapshot
from sparsellm.runs.files import fsync
from sparsellm.runs.manifest import FileEntry, Manifest, read_manifest, write_pieces
from sparsellm.runs.tensor_files import Part, file_name, write_parts
from sparsellm.waiting import warn

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Result = TypeVar("Result")


class Saver:
    """Saves one checkpoint at a time.

    Args:
        folder: folder of the checkpoints; created if missing.
        keep: number of newest checkpoints of the current branch to keep.
        ancestors: ids of the checkpoints that the run continues, the last one first.
        group: CPU process group used only for saving; None for one process.
        milestone: step whose checkpoint is kept beside the newest.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ancestors: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
        milestone: int | None = None,
    ) -> None:
        self.ancestors = list(ancestors)
        self._folder, self._keep, self._group = folder, keep, group
        self._milestone = milestone
        self._rank = dist.get_rank(group) if group else 0
        self._world_size = dist.get_world_size(group) if group else 1
        # The host memory that the GPU copies to is pinned, and kept from one save to the next. The
        # first save allocates it while training waits: 10 s at 2B on one H200, 6 s on two, while
        # later ones block for 0.5 s. A thread could not hide this: the optimizer's tensors exist
        # only after the first step, and no streams run during an allocation of pinned memory.
        self._pinned = torch.cuda.is_available()
        self._copier = StateDictStager(pin_memory=self._pinned, share_memory=False)
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[Path] | None = None
        self.failed = False  # the save in progress has; `wait` says why

    @property
    def finished(self) -> bool:
        """Whether `wait` would return a checkpoint at once."""
        return bool(self._pending and self._pending.done() and not self.failed)

    def begin(self, snapshot: Snapshot) -> None:
        """Starts to write ``step_…``; all ranks call it. Waits for the previous save first.

        The caller may change the tensors as soon as it returns.

        Raises:
            CheckpointError: the previous save has failed.
        """
        self.wait()
        position = json.dumps(snapshot.data, indent=1) + "\n"
        texts = {f"{checkpoint.rank_name(self._rank)}.json": position.encode()}
        if self._rank == 0:
            trainer = snapshot.trainer | {"format": checkpoint.FORMAT}
            texts[checkpoint.TRAINER_FILE] = (json.dumps(trainer, indent=1) + "\n").encode()
            texts[checkpoint.RECIPE_FILE] = snapshot.recipe_yaml.encode()
            texts |= snapshot.files
        tensors = self._rank_tensors(snapshot)
        skipped = int(snapshot.trainer.get("skipped_in_a_row", 0))
        self.failed = False
        self._pending = self._thread.submit(self._save, snapshot.step, skipped, texts, tensors)

    def wait(self) -> Path | None:
        """The checkpoint that was begun, once it is published; None if there is none to wait for.

        Raises:
            CheckpointError: some rank could not write (a full disk, say). What was written is
                removed, ``latest`` and the checkpoint that it names are untouched.
        """
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def close(self) -> None:
        """Waits for the save in progress, whose failure is a warning here; frees its memory."""
        try:
            self.wait()
        except CheckpointError as error:
            warn(str(error))
        self._thread.shutdown()
        self._copier.close()

    def _rank_tensors(self, snapshot: Snapshot) -> dict[str, dict[str, Part]]:
        """What this rank writes into its tensor files, by their names; copies in host memory."""
        kinds = {checkpoint.MODEL: snapshot.model, checkpoint.OPTIMIZER: snapshot.optimizer}
        tensors = {(kind, name): t for kind, state in kinds.items() for name, t in state.items()}
        owned = _share_out(tensors, self._rank, self._world_size)
        parts = {key: Part.held(tensors[key].detach()) for key in owned}
        copies = self._copier.stage(
            {key: part.tensor for key, part in parts.items()}, non_blocking=self._pinned
        )
        if self._pinned:
            torch.cuda.synchronize()
        files: dict[str, dict[str, Part]] = {}
        if self._world_size == 1:  # an import has no optimizer state, but a file for it
            files = {file_name(kind, 0, 1): {} for kind in kinds}
        for (kind, name), part in parts.items():
            if part.tensor.numel() or not tensors[kind, name].numel():
                content = files.setdefault(file_name(kind, self._rank, self._world_size), {})
                content[name] = Part(copies[kind, name], part.offsets)
        small = {checkpoint.rank_name(self._rank): snapshot.rng}
        if self._rank == 0:
            small[checkpoint.STATS] = snapshot.stats
        for kind, content_of in small.items():
            on_host = {n: t.detach().to("cpu", copy=True) for n, t in content_of.items()}
            files[file_name(kind, 0, 1)] = {n: Part.held(t) for n, t in on_host.items()}
        return files

    def _save(
        self, step: int, skipped: int, texts: dict[str, bytes], tensors: dict[str, dict[str, Part]]
    ) -> Path:
        """Runs in the background: makes the folder, writes the ranks' files, and publishes them."""
        final = self._folder / checkpoint.step_name(step)
        partial = final.with_name(f".tmp-{final.name}")

        def publish(written: list[dict[str, FileEntry]]) -> None:
            files = {
                name: entry for rank_entries in written for name, entry in rank_entries.items()
            }
            manifest = Manifest(
                id=secrets.token_hex(8),
                ancestors=self.ancestors,
                step=step,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                world_size=self._world_size,
                files=dict(sorted(files.items())),
            )
            folders.publish(partial, final, manifest)
            self.ancestors = manifest.branch
            try:
                folders.prune(self._folder, manifest, self._keep, skipped, self._milestone)
            except OSError as error:  # the new checkpoint is saved
                warn(f"an old checkpoint could not be deleted: {error}")

        is_first = self._rank == 0
        try:
            self._on_all(lambda: folders.prepare(partial) if is_first else None)
            written = self._on_all(lambda: _write_files(partial, texts, tensors))
            self._on_all(lambda: publish(written) if is_first else None)
        except Exception as error:
            self.failed = True
            if is_first:
                folders.attempt(folders.remove, partial)
            raise CheckpointError(_failure_message(self._folder, final, error)) from error
        return final

    def _on_all(self, action: Callable[[], Result]) -> list[Result]:
        """The results of ``action`` on all ranks; if some fail, all raise the first error."""
        result, failure = [], None
        try:
            result = [action()]
        except Exception as error:
            failure = error
        everyone = [(result, failure)] * self._world_size
        if self._group is not None:
            dist.all_gather_object(everyone, (result, failure), self._group)
        for rank, (_, failed) in enumerate(everyone):
            if failed is not None:
                if self._world_size > 1:
                    failed.add_note(f"rank {rank}")
                raise failed
        return [item for results, _ in everyone for item in results]


def save(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Writes ``folder/step_…`` from this process alone, and waits for it.

    It continues the newest checkpoint of the folder, if there is one.

    Raises:
        CheckpointError: as `Saver.wait`.
    """
    newest = checkpoint.latest(folder)
    saver = Saver(folder, keep, read_manifest(newest).branch if newest else ())
    saver.begin(snapshot)
    path = saver.wait()
    assert path is not None
    saver.close()
    return path


def _share_out(
    tensors: dict[tuple[str, str], Tensor], rank: int, world_size: int
) -> list[tuple[str, str]]:
    """The tensors that a rank writes, or its shard of which, with about equal bytes per rank."""
    load, owned = [0] * world_size, []
    for number, key in enumerate(sorted(tensors, key=lambda key: (-tensors[key].nbytes, key))):
        tensor = tensors[key]
        if isinstance(tensor, DTensor):
            # Ranks that hold the same shard (HSDP) take turns.
            mesh = zip(
                tensor.placements,
                tensor.device_mesh.shape,
                tensor.device_mesh.get_coordinate() or (),
                strict=True,
            )
            replica, replicas = 0, 1
            for placement, size, place in mesh:
                if placement.is_replicate():
                    replica, replicas = replica * size + place, replicas * size
            is_own = number % replicas == replica
        else:
            owner = load.index(min(load))
            load[owner] += tensor.nbytes
            is_own = owner == rank
        if is_own:
            owned.append(key)
    return owned


def _write_files(
    partial: Path, texts: dict[str, bytes], tensors: dict[str, dict[str, Part]]
) -> dict[str, FileEntry]:
    """Writes tensor files in parallel threads, most of which wait for the disk."""
    folders = {(partial / name).parent for name in texts}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    files = {name: write_pieces(partial / name, [memoryview(text)]) for name, text in texts.items()}
    for folder in folders - {partial}:
        fsync(folder)
    paths = [partial / name for name in tensors]
    with ThreadPoolExecutor(len(paths)) as pool:
        written = pool.map(write_parts, paths, tensors.values())
        return files | dict(zip(tensors, written, strict=True))


def _failure_message(folder: Path, final: Path, failure: Exception) -> str:
    previous = checkpoint.latest(folder)
    fallback = f"{previous} is intact" if previous else "there is no earlier checkpoint"
    who = "".join(f" ({note})" for note in getattr(failure, "__notes__", []))
    full = isinstance(failure, OSError) and failure.errno in _FULL
    remedy = "Free space" if full else "Fix that"
    return (
        f"checkpoint {final} was not written: {failure}{who}; {fallback}. {remedy} and start again"
    )
