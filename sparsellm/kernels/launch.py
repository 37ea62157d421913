"""Launches compiled kernels through the driver, each overlapping the end of the one before it.

CuPy compiles; its own launch knows no attributes, and programmatic dependent launch is one: a
kernel's blocks are brought up while the last ones of the kernel before still run, and wait at
``await_previous_kernel`` (cuda/ptx.cuh), which every kernel here calls before anything else. It
saves a microsecond or two a kernel, of the 15 that a whole FFN takes for 8 tokens.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import numpy as np

_ALLOW_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h
_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE
_MOST_PARAMETER_BYTES = 4096

# How an argument lies in the kernel's parameters: code of `struct`, alignment.
_TYPES: dict[type, tuple[str, int]] = {
    int: ("Q", 8),  # an address
    np.int32: ("i", 4),
    np.uint64: ("Q", 8),
    np.float32: ("f", 4),
    bytes: ("128s", 64),  # a tensor map
}


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class _Local(threading.local):
    """What a launch fills in: one set a thread, for making it anew would cost microseconds."""

    def __init__(self) -> None:
        self.parameters = ctypes.create_string_buffer(_MOST_PARAMETER_BYTES)
        self.size = ctypes.c_size_t()
        address, size = ctypes.addressof(self.parameters), ctypes.addressof(self.size)
        self.extra = (ctypes.c_void_p * 5)(_BUFFER, address, _BUFFER_SIZE, size, None)
        self.config = _Config((1, 1, 1), (1, 1, 1))
        self.config.attributes = ctypes.pointer(_Attribute(_ALLOW_OVERLAP, value=1))


_local = _Local()


@functools.cache
def driver() -> Any:
    """libcuda, which whoever has a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


@functools.cache
def layout(types: tuple[type, ...]) -> struct.Struct:
    """How arguments of these types lie in memory, as the kernel's C++ signature has them.

    Raises:
        KeyError: a type that no kernel takes.
    """
    code, size = "<", 0
    for argument in types:
        letter, alignment = _TYPES[argument]
        padding = -size % alignment
        code += f"{padding}x{letter}"
        size += padding + struct.calcsize(f"<{letter}")
    return struct.Struct(code)


def launch(  # noqa: PLR0917
    function: int,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: tuple[Any, ...],
    stream: int,
    *,
    overlap: bool,
) -> None:
    """Queues a kernel; returns at once.

    Args:
        function: the driver's handle.
        grid: blocks.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: addresses as int, numbers as NumPy scalars, tensor maps as bytes.
        stream: the driver's handle.
        overlap: start before the kernel before has ended (compute capability 9.0 and newer).

    Raises:
        RuntimeError: the driver refuses.
    """
    packed = layout(tuple(map(type, arguments)))
    packed.pack_into(_local.parameters, 0, *arguments)
    _local.size.value = packed.size
    config = _local.config
    config.grid[0], config.block[0] = grid, threads
    config.shared_bytes, config.stream, config.num_attributes = shared_bytes, stream, overlap
    result = _launcher()(ctypes.addressof(config), function, None, ctypes.addressof(_local.extra))
    if result != 0:
        raise RuntimeError(
            f"the driver refused a launch of {grid} blocks of {threads} threads with "
            f"{shared_bytes} bytes of shared memory (CUDA error {result})"
        )
