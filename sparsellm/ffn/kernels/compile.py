"""Compiles ``cuda/*/*.cu`` for the GPU at hand through CuPy, once per node.

CuPy caches the machine code on disk (`compile_cache`) under a key of source and options. The key
does not cover included headers, so a digest of them is passed as an option.

A source has one kernel or several, and exports constants for the launches of each as
``<kernel>_<name>``: ``threads`` of a block and ``shared_bytes`` (dynamic shared memory of a block),
and whatever else Python must know, so that each number is stated once.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import calculate_time_spent

from sparsellm.architecture import rectified_activations
from sparsellm.ffn.kernels.compile_cache import compiled_once, prepare_cache
from sparsellm.ffn.kernels.gpu_architecture import architecture_of, target_of
from sparsellm.ffn.kernels.launch import Layout, kernels_of, launch
from sparsellm.paths import bundled, how_to_install_cuda


@functools.cache
def sources() -> dict[str, Path]:
    """The file of each kernel's device code, by the kernel's name."""
    return {
        kernel: path
        for path in sorted(bundled("cuda").glob("*/*.cu"))
        for kernel in kernels_of(path.read_text(encoding="utf-8"))
    }


def compile_options(  # noqa: PLR0917
    source: Path,
    folder: str,
    target: str,
    shared_kib: int,
    element: torch.dtype = torch.bfloat16,
    activation: str = "relu",
) -> tuple[str, ...]:
    """NVRTC options.

    Args:
        source: of `sources`.
        folder: the architecture's, for the headers that each has of its own.
        target: such as ``sm_90a``.
        shared_kib: shared memory that a block of threads can have, in KiB.
        element: one of `ELEMENTS`, see ``cuda/common/element.cuh``.
        activation: see `for_activation`.
    """
    defined = []
    if activation != _BUILT_IN:
        known = rectified_activations()[activation]
        defined = [f"SPARSELLM_VALUE={known.device_value}", f"SPARSELLM_SLOPE={known.device_slope}"]
    if element == torch.float16:
        defined.append("SPARSELLM_FP16")
    return (
        f"-arch={target}",
        "-std=c++17",
        *(f"-I{path}" for path in (bundled("cuda"), bundled("cuda") / folder)),
        f"-DSPARSELLM_SHARED_KIB={shared_kib}",
        *(f"-D{macro}" for macro in defined),
        f"-DSPARSELLM_HEADERS={_headers_digest(source, folder)}",
    )


_BUILT_IN = "relu"  # what sources compute without further options


def for_activation(kernel: str, activation: str) -> str:
    """The name of a kernel that is compiled for an activation, such as ``decode_gate.relu2``.

    Kernels whose source includes ``cuda/common/activation.cuh`` differ between activations. They
    are loaded and launched by such a name.
    """
    return kernel if activation == _BUILT_IN else f"{kernel}.{activation}"


def _parts(name: str) -> tuple[str, str]:
    """The kernel and the activation of a name, see `for_activation`."""
    kernel, _, activation = name.partition(".")
    return kernel, activation or _BUILT_IN


def _headers_digest(source: Path, folder: str) -> str:
    digest = hashlib.sha256()
    for header in sorted(_included(source, folder)):
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def _included(source: Path, folder: str) -> set[Path]:
    """All headers that a source includes, directly or not."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        text = pending.pop().read_text(encoding="utf-8")
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            header = bundled("cuda") / (name if "/" in name else f"{folder}/{name}")
            if header not in found:
                found.add(header)
                pending.append(header)
    return found


@dataclass(frozen=True)
class Kernel:
    """A compiled ``__global__`` function on one device."""

    function: Any  # cupy.cuda.Function
    layout: Layout  # of its parameters
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    num_multiprocessors: int
    may_overlap: bool  # see `launch`


_SECONDS: list[float] = []  # that each source took: compiled, read from disk, or waited for


def compile_seconds() -> float:
    """Seconds in which this process has waited for compilation: of kernels here, and of graphs.

    Of torch.compile's graphs it is what `calculate_time_spent` counts: tracing, code generation and
    waiting for compilers, in forward and backward passes.
    """
    graphs: float = calculate_time_spent()["total_wall_time"]
    return graphs + sum(_SECONDS)


@functools.cache
def _module(
    path: Path, folder: str, device_index: int, element: torch.dtype, activation: str
) -> Any:
    prepare_cache()
    try:
        import cupy
    except ImportError as error:
        remedy = how_to_install_cuda(torch.version.cuda)
        raise RuntimeError(f"the CUDA kernels need CuPy: {remedy}; or run without them") from error
    with cupy.cuda.Device(device_index) as device:
        major, minor = int(device.compute_capability[:-1]), int(device.compute_capability[-1])
        shared_kib = device.attributes["MaxSharedMemoryPerBlockOptin"] // 1024
        source = path.read_text(encoding="utf-8")
        target = target_of((major, minor))
        options = compile_options(path, folder, target, shared_kib, element, activation)
        began = time.perf_counter()
        with compiled_once(path.stem, source, options):
            module = cupy.RawModule(code=source, options=options)
            module.get_function(next(iter(kernels_of(source))))  # which compiles
        _SECONDS.append(time.perf_counter() - began)
        return module


def exported(kernel: str, name: str, device_index: int, element: torch.dtype) -> int:
    """The constant ``<kernel>_<name>`` of a kernel's source.

    Raises:
        RuntimeError: as `load`.
    """
    return _exported(kernel, name, architecture_of(device_index).folder, device_index, element)


@functools.cache
def _exported(kernel: str, name: str, folder: str, device_index: int, element: torch.dtype) -> int:
    kernel, activation = _parts(kernel)
    module = _module(sources()[kernel], folder, device_index, element, activation)
    import cupy
    import numpy as np

    with cupy.cuda.Device(device_index):
        return int(cupy.ndarray((1,), np.uint32, module.get_global(f"{kernel}_{name}"))[0])


def load(kernel: str, device_index: int, element: torch.dtype) -> Kernel:
    """A kernel, compiled for and loaded on a device.

    ``element`` is one of `ELEMENTS`; ``kernel`` may be a name of `for_activation`.

    Raises:
        RuntimeError: CuPy is not installed; the source does not compile for the device.
    """
    return _load(kernel, architecture_of(device_index).folder, device_index, element)


@functools.cache
def _load(kernel: str, folder: str, device_index: int, element: torch.dtype) -> Kernel:
    own, activation = _parts(kernel)
    path = sources()[own]
    module = _module(path, folder, device_index, element, activation)
    import cupy

    with cupy.cuda.Device(device_index) as device:
        function = module.get_function(own)
        shared_bytes = exported(kernel, "shared_bytes", device_index, element)
        if shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared_bytes
        parameters = kernels_of(path.read_text(encoding="utf-8"))[own]
        return Kernel(
            function=function.kernel,
            layout=Layout(own, parameters),
            threads=exported(kernel, "threads", device_index, element),
            shared_bytes=shared_bytes,
            num_multiprocessors=device.attributes["MultiProcessorCount"],
            may_overlap=int(device.compute_capability[:-1]) >= 9,
        )


def load_like(kernel: str, tensor: torch.Tensor) -> Kernel:
    """The kernel for a tensor's device and type; bf16 if it has another type."""
    return load(kernel, tensor.get_device(), _element_of(tensor))


def exported_like(kernel: str, name: str, tensor: torch.Tensor) -> int:
    """`exported` by the kernel for a tensor's device and type."""
    return exported(kernel, name, tensor.get_device(), _element_of(tensor))


def _element_of(tensor: torch.Tensor) -> torch.dtype:
    return torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16


def launch_for(kernel: str, like: torch.Tensor, grid: int, *arguments: Any) -> None:
    """Queues a kernel on the current stream of a tensor's device; returns at once.

    Args:
        kernel: its name.
        like: the tensor; where it is fp16, so are the kernel's elements.
        grid: number of blocks.
        arguments: as `launch` takes them.
    """
    index = like.get_device()
    loaded = load(kernel, index, _element_of(like))
    launch(
        loaded.function.ptr,
        grid,
        loaded.threads,
        loaded.shared_bytes,
        loaded.layout,
        arguments,
        torch._C._cuda_getCurrentRawStream(index),  # `current_stream` makes an object of it
        overlap=loaded.may_overlap,
    )


def threads_of(kernel: str, like: torch.Tensor) -> int:
    """Threads of a block of a kernel, on a tensor's device."""
    return load_like(kernel, like).threads


def grid_size(kernel: str, like: torch.Tensor, units: int, each: int = 1) -> int:
    """Blocks of threads for so many units of work: at most ``each`` per multiprocessor."""
    return min(load_like(kernel, like).num_multiprocessors * each, units)


def launch_units(kernel: str, like: torch.Tensor, units: int, *arguments: Any) -> None:
    """`launch_for`, with as many blocks as so many units of work or a GPU occupy.

    The kernel exports how many ``blocks`` a multiprocessor has at a time.
    """
    grid = grid_size(kernel, like, units, exported_like(kernel, "blocks", like))
    launch_for(kernel, like, grid, *arguments)
