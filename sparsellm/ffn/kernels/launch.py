"""Launches compiled kernels through the driver, each overlapping the end of the one before it.

CuPy compiles; its own launch knows no attributes, and programmatic dependent launch is one: a
kernel's blocks are brought up while the last ones of the kernel before still run, and wait at
``await_previous_kernel`` (cuda/common/ptx.cuh), which every kernel here calls before anything else.
It saves a microsecond or two a kernel, of the 15 that a whole FFN takes for 8 tokens.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import numpy as np
import torch

_ALLOW_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h
_MAX_PARAMETER_BYTES = 4096

# What `struct` makes of an argument.
_CODES: dict[type, str] = {
    int: "Q",  # an address
    np.int32: "i",
    np.uint64: "Q",
    np.float32: "f",
    bytes: "128s",  # a tensor map
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
        self.parameters = ctypes.create_string_buffer(_MAX_PARAMETER_BYTES)
        self.pointers: dict[tuple[type, ...], ctypes.Array[ctypes.c_void_p]] = {}
        self.config = _Config((1, 1, 1), (1, 1, 1))
        self.config.attributes = ctypes.pointer(_Attribute(_ALLOW_OVERLAP, value=1))
        self.entered = False  # a context

    def pointers_to(self, types: tuple[type, ...]) -> ctypes.Array[ctypes.c_void_p]:
        """Where the driver finds each of the packed arguments."""
        found = self.pointers.get(types)
        if found is None:
            sizes = [struct.calcsize(f"<{_CODES[t]}") for t in types]
            start = ctypes.addressof(self.parameters)
            places = [start + sum(sizes[:i]) for i in range(len(sizes))]
            found = self.pointers[types] = (ctypes.c_void_p * len(places))(*places)
        return found


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
def _layout(types: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(_CODES[argument] for argument in types))


def _enter_context() -> None:
    """Makes the current device's primary context this thread's, as any call of the runtime does.

    `torch.cuda.set_device` makes none where the device does not change.
    """
    import cupy

    cupy.cuda.runtime.setDevice(torch.cuda.current_device())


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
        KeyError: an argument of a type that no kernel takes.
        RuntimeError: the driver refuses.
    """
    types = tuple(map(type, arguments))
    _layout(types).pack_into(_local.parameters, 0, *arguments)
    config = _local.config
    config.grid[0], config.block[0] = grid, threads
    config.shared_bytes, config.stream, config.num_attributes = shared_bytes, stream, overlap
    pointers = ctypes.addressof(_local.pointers_to(types))
    if not _local.entered:  # it may be the first that a thread, of autograd's say, asks of CUDA
        _enter_context()
        _local.entered = True
    result = _launcher()(ctypes.addressof(config), function, pointers, None)
    if result != 0:
        raise RuntimeError(
            f"the driver refused a launch of {grid} blocks of {threads} threads with "
            f"{shared_bytes} bytes of shared memory (CUDA error {result})"
        )
