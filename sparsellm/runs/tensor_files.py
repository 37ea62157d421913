"""Tensors, or rectangular parts of them, in safetensors files.

A checkpoint has three kinds: ``model``, ``optimizer`` and ``stats``. One process writes one file of
each (``model.safetensors``); several write their parts (``model-00001-of-00002.safetensors``, …).
The offsets of a part in its tensor are in the file's metadata.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsellm.recipe.strict import damaged, parse_json
from sparsellm.runs.manifest import REMEDY, FileEntry, files_like, write_pieces

_READ_THREADS = 8

_OFFSETS_KEY = "DCP_SHARDING_INFO"
_TORCH_DTYPES: dict[str, Any] = _TYPES  # by the names of the format
_DTYPES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]  # of its first element

    @classmethod
    def held(cls, tensor: Tensor) -> Self:
        """What this rank holds of a tensor: all of it, or the shard of a DTensor."""
        if not isinstance(tensor, DTensor):
            return cls(tensor, (0,) * tensor.dim())
        [chunk] = tensor.__create_chunk_list__()
        return cls(tensor.to_local(), tuple(chunk.offsets))


@dataclass(frozen=True)
class StoredPart:
    """The file and position of a rectangle of a tensor."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def common_with(self, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where both have the same elements: in the file's tensor, and in the part's."""
        file_slices, part_slices = [], []
        for offset, size, part_offset, length in zip(
            self.offsets, self.shape, part.offsets, part.tensor.shape, strict=True
        ):
            first, end = max(offset, part_offset), min(offset + size, part_offset + length)
            if first >= end:
                return None
            file_slices.append(slice(first - offset, end - offset))
            part_slices.append(slice(first - part_offset, end - part_offset))
        return tuple(file_slices), tuple(part_slices)


def file_name(kind: str, rank: int, world_size: int) -> str:
    """The file of one rank."""
    if world_size == 1:
        return f"{kind}.safetensors"
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def files_of(folder: Path, kind: str) -> list[Path]:
    """The files of a kind in a checkpoint, those of several ranks in their order."""
    return files_like(folder, f"{kind}*.safetensors")


def write_parts(path: Path, parts: dict[str, Part]) -> FileEntry:
    """Writes a safetensors file of parts on the CPU; its hashes are computed on the way."""
    # The largest elements first: then all of them are aligned.
    names = sorted(parts, key=lambda name: (-parts[name].tensor.element_size(), name))
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            _OFFSETS_KEY: json.dumps(
                {name: {"saved_offsets": parts[name].offsets} for name in names}
            ),
        }
    }
    end = 0
    for name in names:
        tensor = parts[name].tensor
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = parts[name].tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data

    return write_pieces(path, pieces())


def stored_parts(path: Path) -> list[StoredPart]:
    """The parts in a file.

    Raises:
        ValueError: it is not a safetensors file, or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(_OFFSETS_KEY, "{}")
            offsets = parse_json(written, _OFFSETS_KEY, REMEDY)
            parts = []
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                first = offsets[name]["saved_offsets"] if offsets else (0,) * len(shape)
                dtype = _TORCH_DTYPES[part.get_dtype()]
                parts.append(StoredPart(path, name, dtype, shape, tuple(first)))
            return parts
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, error, REMEDY) from error


class StoredTensors:
    """The tensors of a kind in a checkpoint, however many ranks wrote them.

    Raises:
        FileNotFoundError: there is no file of the kind.
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._parts: dict[str, list[StoredPart]] = defaultdict(list)
        paths = files_of(folder, kind)
        if not paths:
            raise FileNotFoundError(f"{folder / f'{kind}.safetensors'} is missing; {REMEDY}")
        for part in (part for path in paths for part in stored_parts(path)):
            self._parts[part.name].append(part)

    def empty(self) -> dict[str, Tensor]:
        """Whole tensors on the meta device: their shapes and types."""
        tensors = {}
        for name, parts in self._parts.items():
            ends = ([o + n for o, n in zip(p.offsets, p.shape, strict=True)] for p in parts)
            shape = [max(sizes) for sizes in zip(*ends, strict=True)]
            tensors[name] = torch.empty(shape, dtype=parts[0].dtype, device="meta")
        return tensors

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fills tensors by name; of a DTensor the shard that this rank holds.

        Raises:
            ValueError: a file is damaged.
        """
        jobs: dict[Path, list[tuple[Tensor, str, tuple[slice, ...]]]] = defaultdict(list)
        for name, tensor in tensors.items():
            held = Part.held(tensor.detach())
            for part in self._parts[name]:
                if (common := part.common_with(held)) is not None:
                    jobs[part.path].append((held.tensor[common[1]], name, common[0]))
        shares = [
            (path, path_jobs[first::_READ_THREADS])
            for path, path_jobs in jobs.items()
            for first in range(min(_READ_THREADS, len(path_jobs)))
        ]
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            for done in [pool.submit(self._copy, *share) for share in shares]:
                done.result()

    def _copy(self, path: Path, jobs: list[tuple[Tensor, str, tuple[slice, ...]]]) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for target, name, where in jobs:
                    target.copy_(file.get_slice(name)[where or ...])
        except SafetensorError as error:
            raise damaged(path, error, REMEDY) from error
