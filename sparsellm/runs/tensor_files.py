"""Tensors, or rectangular parts of them, in safetensors files.

A checkpoint has three kinds: ``model``, ``optimizer`` and ``stats``. One process writes one file of
each (``model.safetensors``); several write their parts (``model-00001-of-00002.safetensors``, …).
The offsets of a part in its tensor are in the file's metadata, under the key that
torch.distributed.checkpoint uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import NonNegativeInt, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsellm.runs.files import damaged
from sparsellm.runs.manifest import FileEntry, files_like, write_pieces
from sparsellm.strict import parse_json

_OFFSETS_KEY = "DCP_SHARDING_INFO"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor."""

    tensor: Tensor  # on the CPU
    offsets: tuple[int, ...]  # of its first element


@dataclass(frozen=True)
class _PartOffsets:
    saved_offsets: list[NonNegativeInt]


_Offsets = TypeAdapter(dict[str, _PartOffsets])


@dataclass(frozen=True)
class StoredPart:
    """The file and position of a rectangle of a tensor."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def file_name(kind: str, rank: int, world_size: int) -> str:
    """The file of one rank."""
    if world_size == 1:
        return f"{kind}.safetensors"
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def files_of(folder: Path, kind: str, remedy: str) -> list[Path]:
    """The files of a kind in a checkpoint, those of several ranks in their order."""
    single = files_like(folder, f"{kind}.safetensors", remedy)
    return single or files_like(folder, f"{kind}-*-of-*.safetensors", remedy)


def write_parts(path: Path, parts: dict[str, Part]) -> FileEntry:
    """Writes a safetensors file; its hashes are computed on the way."""
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


def stored_parts(path: Path, remedy: str) -> list[StoredPart]:
    """The parts in a file.

    Raises:
        ValueError: it is not a safetensors file, or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(_OFFSETS_KEY, "{}")
            offsets = _Offsets.validate_python(parse_json(written, _OFFSETS_KEY, remedy))
            found = []
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                first = offsets[name].saved_offsets if offsets else (0,) * len(shape)
                dtype = _TORCH_DTYPES[part.get_dtype()]
                found.append(StoredPart(path, name, dtype, shape, tuple(first)))
            return found
    except (SafetensorError, KeyError, ValueError) as error:
        raise damaged(path, error, remedy) from error
