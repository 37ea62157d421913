"""torch.distributed.checkpoint's view of a checkpoint folder: a storage writer and a reader.

The engine plans who writes and who reads which part of which tensor; here the parts go to the files
of `tensor_files`, and the coordinator publishes the folder once all ranks have written theirs. Keys
of the engine's state dicts are ``<kind>/<tensor>``.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sparsellm.runs.files import damaged
from sparsellm.runs.manifest import FileEntry
from sparsellm.runs.tensor_files import (
    Part,
    StoredPart,
    file_name,
    files_of,
    stored_parts,
    write_parts,
)

_READ_THREADS = 8


class CheckpointWriter(StorageWriter):
    """Writes this rank's parts, and on the coordinator publishes the checkpoint.

    Args:
        folder: the folder, which the coordinator creates by ``prepare``.
        rank: rank of this process.
        world_size: number of ranks.
        prepare: called on the coordinator before any rank writes.
        write_own: writes this rank's other files and returns them.
        publish: called on the coordinator with all files, once every rank has written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        *,
        prepare: Callable[[], None],
        write_own: Callable[[], dict[str, FileEntry]],
        publish: Callable[[dict[str, FileEntry]], None],
    ) -> None:
        self._folder = folder
        self._rank, self._world_size = rank, world_size
        self._prepare, self._write_own, self._publish = prepare, write_own, publish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: makes the folder."""
        self._prepare()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes one file per kind in parallel threads, most of which wait for the disk."""
        kinds: dict[str, dict[str, Part]] = defaultdict(dict)
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            assert item.tensor_data is not None
            kind, _, name = item.index.fqn.partition("/")
            if data.numel() or not item.tensor_data.size.numel():
                offsets = tuple(item.tensor_data.chunk.offsets)
                kinds[kind][name] = Part(data, offsets)
        names = {kind: file_name(kind, self._rank, self._world_size) for kind in kinds}
        files = self._write_own()
        with ThreadPoolExecutor(max(len(kinds), 1)) as pool:
            written = {
                names[kind]: pool.submit(write_parts, self._folder / names[kind], parts)
                for kind, parts in kinds.items()
            }
        files |= {name: entry.result() for name, entry in written.items()}
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(MetadataIndex(name), e.size, (name, e)) for name, e in files.items()]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written."""
        self._publish(dict(result.storage_data for rank in results for result in rank))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only."""
        return Path(checkpoint_id).parent.is_dir()


class CheckpointReader(StorageReader):
    """Reads parts of the tensors of a checkpoint, however many ranks wrote them.

    Args:
        folder: the checkpoint.
        kinds: kinds of tensors to read.
        remedy: advice if a file is damaged.

    Raises:
        FileNotFoundError: there is no file of a kind.
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path, kinds: Iterable[str], remedy: str) -> None:
        self._folder, self._remedy = folder, remedy
        self._parts: dict[str, list[StoredPart]] = defaultdict(list)
        for kind in kinds:
            paths = files_of(folder, kind, remedy)
            if not paths:
                raise FileNotFoundError(f"{folder / f'{kind}.safetensors'} is missing; {remedy}")
            for part in (part for path in paths for part in stored_parts(path, remedy)):
                self._parts[f"{kind}/{part.name}"].append(part)

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of every whole tensor."""
        return {name: (_whole_shape(parts), parts[0].dtype) for name, parts in self._parts.items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: no state is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors, and the parts in which they are stored."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=parts[0].dtype),
                    size=_whole_shape(parts),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape))
                        for part in parts
                    ],
                )
                for name, parts in self._parts.items()
            },
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what the plan asks for, several threads at a time."""
        shares = [plan.items[first::_READ_THREADS] for first in range(_READ_THREADS)]
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            for done in [pool.submit(self._read, items, planner) for items in shares if items]:
                done.result()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        by_file: dict[Path, list[tuple[ReadItem, StoredPart]]] = defaultdict(list)
        for item in items:
            part = self._stored(item.storage_index)
            by_file[part.path].append((item, part))
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for item, part in wanted:
                        ranges = zip(item.storage_offsets, item.lengths, strict=True)
                        where = tuple(slice(first, first + count) for first, count in ranges)
                        source = file.get_slice(part.name)[where or ...]
                        planner.resolve_tensor(item).detach().copy_(source)
            except SafetensorError as error:
                raise damaged(path, error, self._remedy) from error

    def _stored(self, index: MetadataIndex) -> StoredPart:
        offsets = tuple(index.offset or ())
        return next(part for part in self._parts[index.fqn] if part.offsets == offsets)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only."""
        return Path(checkpoint_id).is_dir()


def load_tensors(
    tensors: dict[str, torch.Tensor], reader: CheckpointReader, group: ProcessGroup | None = None
) -> None:
    """Fills tensors or DTensors by name, ``<kind>/<tensor>``; all ranks of a group call it.

    Raises:
        ValueError, OSError: the error of some rank; the same on all ranks.
    """
    with engine_errors():
        dcp.load(
            tensors,
            storage_reader=reader,
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises the first rank's own error instead of the engine's collection of all of them."""
    # Of a single process; by a filter that stays, since the engine also warns in its own thread.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as exception:
        rank = min(exception.failures)
        error = exception.failures[rank][0]
        if len(exception.failures) > 1 or rank:
            error.add_note(f"rank {rank}")
        raise error from None


def _whole_shape(parts: list[StoredPart]) -> torch.Size:
    ends = ([o + s for o, s in zip(part.offsets, part.shape, strict=True)] for part in parts)
    return torch.Size(max(sizes) for sizes in zip(*ends, strict=True))
