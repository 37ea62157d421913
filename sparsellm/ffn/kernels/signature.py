"""The parameters of a kernel, read from its source: the driver checks no types."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["pointer", "int", "uint64", "float", "tensor map"]

_KINDS: dict[str, Kind] = {
    "int": "int",
    "uint32": "int",
    "uint64": "uint64",
    "float": "float",
    "const __grid_constant__ TensorMap": "tensor map",
}


class Parameter(NamedTuple):
    """One parameter of a ``__global__`` function."""

    name: str
    kind: Kind


def parameters_of(stem: str, source: str) -> tuple[Parameter, ...]:
    """The parameters of the ``__global__`` function ``stem``, in order.

    Raises:
        ValueError: the source has no such function, or a parameter of a type that no launch passes.
    """
    found = re.search(rf"__global__[^;{{]*?\b{stem}\(([^)]*)\)", source)
    if found is None:
        raise ValueError(f"{stem}.cu has no __global__ function {stem}")
    return tuple(_parameter(stem, text.split()) for text in found.group(1).split(","))


def _parameter(stem: str, words: list[str]) -> Parameter:
    name, declared = words[-1], " ".join(words[:-1])
    if "*" in declared:
        return Parameter(name, "pointer")
    kind = _KINDS.get(declared)
    if kind is not None:
        return Parameter(name, kind)
    raise ValueError(f"{stem}.cu: no launch passes a parameter of type {declared} ({name})")
