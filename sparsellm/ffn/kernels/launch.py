"""Launches compiled kernels through the driver, each overlapping the end of the previous one.

CuPy compiles the kernels, but its launch function takes no launch attributes. Programmatic
dependent launch is such an attribute: a kernel's blocks start while the last blocks of the previous
kernel still run, and wait at ``await_previous_kernel`` (cuda/common/ptx.cuh), which every kernel
here calls before anything else. It saves a microsecond or two per kernel, of the 15 that a whole
FFN takes for 8 tokens.
"""

import ctypes
import functools
import operator
import re
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch


class Address(int):
    """The address of memory that a kernel reads or writes and no tensor owns; 0 for none."""


class Parameter(NamedTuple):
    """One parameter of a ``__global__`` function."""

    name: str
    code: str  # its format for `struct`
    takes: tuple[type, ...]  # Python types


_POINTER = "Q", (torch.Tensor, NoneType, Address)
_OTHERS: dict[str, tuple[str, tuple[type, ...]]] = {  # by declared type
    "int": ("i", (int,)),
    "uint32": ("i", (int,)),
    "uint64": ("Q", (int,)),
    "float": ("f", (float, int)),
    "const __grid_constant__ TensorMap": ("128s", (bytes,)),
    "const __grid_constant__ Addresses": ("512s", (bytes,)),  # of up to 64 tensors; 0 for none
}
_KERNEL = re.compile(r"__global__ void(?:\s+__\w+__\([^()]*\))*\s+(\w+)\(([^)]*)\)")


def kernels_of(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The ``__global__`` functions of a source by name, and their parameters in order.

    They are read from its text: the driver checks no types.

    Raises:
        ValueError: one has a parameter of a type that launches cannot pass.
    """
    return {
        kernel: tuple(_parameter(kernel, text.split()) for text in parameters.split(","))
        for kernel, parameters in _KERNEL.findall(source)
    }


def _parameter(kernel: str, words: list[str]) -> Parameter:
    name, declared = words[-1], " ".join(words[:-1])
    kind = _POINTER if "*" in declared else _OTHERS.get(declared)
    if kind is None:
        raise ValueError(f"{kernel}: launches cannot pass a parameter of type {declared} ({name})")
    return Parameter(name, *kind)


_ALLOW_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h
_MAX_PARAMETER_BYTES = 4096


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


class Layout:
    """How the arguments of one kernel are packed for the driver."""

    def __init__(self, kernel: str, parameters: tuple[Parameter, ...]) -> None:
        codes = [parameter.code for parameter in parameters]
        self._in_order = operator.itemgetter(*(parameter.name for parameter in parameters))
        self.sizes = [struct.calcsize(f"<{code}") for code in codes]
        self._struct = struct.Struct(f"<{''.join(codes)}")
        assert self._struct.size <= _MAX_PARAMETER_BYTES, kernel
        self._kernel, self._parameters = kernel, parameters
        # By the arguments' types, which ones are tensors and which ones are None.
        self._checked: dict[tuple[type, ...], tuple[list[int], list[int]]] = {}

    def pack_into(self, buffer: Any, arguments: Mapping[str, Any]) -> None:
        """Writes the arguments; a combination of types is checked when it first occurs.

        Raises:
            TypeError: the kernel has other parameters.
        """
        try:
            values = list(self._in_order(arguments))
        except KeyError:
            self._check_names(arguments)
            raise
        if len(arguments) != len(values):
            self._check_names(arguments)
        types = tuple(map(type, values))
        tensors, absent = self._checked.get(types) or self._check(types)
        for i in tensors:
            values[i] = values[i].data_ptr()
        for i in absent:
            values[i] = 0
        self._struct.pack_into(buffer, 0, *values)

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        names = [parameter.name for parameter in self._parameters]
        missing = [name for name in names if name not in arguments]
        unknown = [name for name in arguments if name not in names]
        mismatches = ("lacks", missing), ("does not take", unknown)
        reasons = [f"{verb} {', '.join(which)}" for verb, which in mismatches if which]
        if reasons:
            raise TypeError(
                f"{self._kernel} {' and '.join(reasons)}; its arguments are {', '.join(names)}"
            )

    def _check(self, types: tuple[type, ...]) -> tuple[list[int], list[int]]:
        for argument_type, parameter in zip(types, self._parameters, strict=True):
            if not issubclass(argument_type, parameter.takes):
                raise TypeError(
                    f"{self._kernel}: argument {parameter.name} is a {argument_type.__name__}; it "
                    f"takes {' or '.join(t.__name__ for t in parameter.takes)}"
                )
        positions = (
            [i for i, argument_type in enumerate(types) if issubclass(argument_type, torch.Tensor)],
            [i for i, argument_type in enumerate(types) if argument_type is NoneType],
        )
        self._checked[types] = positions
        return positions


class _Prepared:
    """What the driver reads at a launch of one kernel: all but its grid, stream and arguments."""

    def __init__(self, kernel: "Kernel") -> None:
        sizes = kernel.layout.sizes
        self.parameters = ctypes.create_string_buffer(sum(sizes))
        start = ctypes.addressof(self.parameters)
        places = [start + sum(sizes[:i]) for i in range(len(sizes))]
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self._attribute = _Attribute(_ALLOW_OVERLAP, value=1)
        self.config = _Config((1, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes)
        self.config.attributes = ctypes.pointer(self._attribute)
        self.config.num_attributes = kernel.may_overlap
        self.grid = self.config.grid  # the same memory
        self.arguments = (
            ctypes.addressof(self.config),
            kernel.function.ptr,
            ctypes.addressof(self._pointers),
            None,
        )


class _Local(threading.local):
    """What a launch of each kernel fills in. Making it takes microseconds: a thread keeps it."""

    def __init__(self) -> None:
        self.prepared: dict[Kernel, _Prepared] = {}
        self.entered = False  # whether a context is current


_local = _Local()


@functools.cache
def driver() -> Any:
    """libcuda, which comes with the GPU's driver."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


def _enter_context() -> None:
    """Makes the current device's primary context current in this thread, as the CUDA runtime does.

    `torch.cuda.set_device` does not where the device stays the same.
    """
    import cupy

    cupy.cuda.runtime.setDevice(torch.cuda.current_device())


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled ``__global__`` function on one device."""

    function: Any  # cupy.cuda.Function
    layout: Layout  # of its parameters
    threads: int  # of a block, by its launch bounds
    shared_bytes: int  # dynamic shared memory of a block
    exported: Callable[[str], int]  # the constant ``exported_<name>`` of its source
    device_index: int
    num_multiprocessors: int
    may_overlap: bool  # start before the previous kernel has ended (compute capability 9.0 on)

    def blocks_for(self, units: int, each: int = 1) -> int:
        """Blocks of threads for so many units of work: at most ``each`` per multiprocessor."""
        return min(self.num_multiprocessors * each, units)

    def launch_units(self, units: int, /, **arguments: Any) -> None:
        """`launch`, with as many blocks as so many units of work or a GPU occupy."""
        self.launch(self.blocks_for(units, self.exported("blocks")), **arguments)

    def launch(self, grid: int, /, **arguments: Any) -> None:
        """Queues the kernel on the current stream of its device; returns at once.

        Args:
            grid: number of blocks.
            arguments: by the names that the kernel's source has for its parameters; tensors, None
                or `Address` for pointers; numbers; tensor maps and lists of addresses as bytes.

        Raises:
            TypeError: the arguments are not those of the kernel.
            RuntimeError: the driver refuses.
        """
        prepared = _local.prepared.get(self)
        if prepared is None:
            prepared = _local.prepared[self] = _Prepared(self)
        self.layout.pack_into(prepared.parameters, arguments)
        prepared.grid[0] = grid
        # `current_stream` would make an object of it.
        prepared.config.stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        if not _local.entered:  # this may be a thread's first CUDA call, as in autograd's threads
            _enter_context()
            _local.entered = True
        result = _launcher()(*prepared.arguments)
        if result != 0:
            raise RuntimeError(
                f"the driver refused a launch of {grid} blocks of {self.threads} threads with "
                f"{self.shared_bytes} bytes of shared memory (CUDA error {result})"
            )


# Types of cuda.h. Only an element's size matters to a copy: bf16 serves for fp16 too, bytes for
# e4m3.
_TYPES = {1: 0, 2: 9}
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
_ROW_BYTES = 128  # of a box
_OPAQUE_BYTES = 128
NO_TENSOR_MAP = bytes(_OPAQUE_BYTES)  # for kernels that do not read theirs


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, rows: int, columns: int, box_rows: int, element_bytes: int = 2
) -> bytes:
    """What the bulk copy engine (TMA) needs to know of a row-major matrix, encoded by the driver.

    Its boxes are ``box_rows`` × 128 bytes, swizzled by 128 bytes.

    Returns:
        128 bytes, which the kernel takes by value.

    Raises:
        RuntimeError: the driver refuses, such as an address that is not a multiple of 16 bytes.
    """
    # The driver wants 64-byte alignment of what it fills.
    raw = np.zeros(_OPAQUE_BYTES + 64, np.uint8)
    start = -raw.ctypes.data % 64
    aligned = raw[start : start + _OPAQUE_BYTES]
    result = driver().cuTensorMapEncodeTiled(
        aligned.ctypes.data_as(ctypes.c_void_p),
        _TYPES[element_bytes],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * element_bytes),
        (ctypes.c_uint32 * 2)(_ROW_BYTES // element_bytes, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        0,
    )
    if result != 0:
        raise RuntimeError(
            f"the driver refused a tensor map of {rows} × {columns} elements at {address:#x} "
            f"(CUDA error {result}); the matrix must start at a multiple of 16 bytes"
        )
    return aligned.tobytes()
