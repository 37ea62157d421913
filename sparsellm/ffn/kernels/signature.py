"""The kernels of a source and their parameters, read from its text: the driver checks no types."""

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


_DECLARED = re.compile(r"__global__ void(?:\s+__\w+__\([^()]*\))*\s+(\w+)\(([^)]*)\)")


def kernels_of(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The ``__global__`` functions of a source by name, and their parameters in order.

    Raises:
        ValueError: one has a parameter of a type that no launch passes.
    """
    return {
        kernel: tuple(_parameter(kernel, text.split()) for text in parameters.split(","))
        for kernel, parameters in _DECLARED.findall(source)
    }


def _parameter(kernel: str, words: list[str]) -> Parameter:
    name, declared = words[-1], " ".join(words[:-1])
    if "*" in declared:
        return Parameter(name, "pointer")
    kind = _KINDS.get(declared)
    if kind is not None:
        return Parameter(name, kind)
    raise ValueError(f"{kernel}: no launch passes a parameter of type {declared} ({name})")
