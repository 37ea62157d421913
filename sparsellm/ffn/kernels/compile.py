"""Compiles ``cuda/*/<stem>.cu`` for the GPU at hand through CuPy, once per node.

CuPy keeps the machine code on disk (`compile_cache`) under a key of source and options, which does
not see included headers: a digest of them is an option here.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsellm.ffn.kernels.compile_cache import compiled_once, prepare_cache
from sparsellm.ffn.kernels.gpu_architecture import Source, target_of
from sparsellm.ffn.kernels.launch import launch
from sparsellm.paths import bundled, how_to_install


def sources() -> dict[str, Path]:
    """The file of each op's device code, by stem; they lie in a folder per architecture."""
    return {path.stem: path for path in sorted(bundled("cuda").glob("*/*.cu"))}


@functools.cache
def source_path(stem: str) -> Path:
    """The file of one op's device code."""
    return sources()[stem]


def compile_options(
    stem: str, target: str, shared_kib: int, element: torch.dtype = torch.bfloat16
) -> tuple[str, ...]:
    """NVRTC options.

    Args:
        stem: of ``cuda/*/<stem>.cu``.
        target: such as ``sm_90a``.
        shared_kib: shared memory that a block of threads can have, in KiB.
        element: one of `ELEMENTS`, see ``cuda/common/element.cuh``.
    """
    return (
        f"-arch={target}",
        "-std=c++17",
        f"-I{bundled('cuda')}",
        f"-DSPARSELLM_SHARED_KIB={shared_kib}",
        *(("-DSPARSELLM_FP16",) if element == torch.float16 else ()),
        f"-DSPARSELLM_HEADERS={_headers_digest(source_path(stem))}",
    )


def _headers_digest(source: Path) -> str:
    digest = hashlib.sha256()
    for header in sorted(_included(source)):
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def _included(source: Path) -> set[Path]:
    """All headers that a source includes, directly or not."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        text = pending.pop().read_text(encoding="utf-8")
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            header = bundled("cuda") / name
            if header not in found:
                found.add(header)
                pending.append(header)
    return found


@dataclass(frozen=True)
class Kernel:
    """A compiled ``__global__`` function on one device."""

    function: Any  # cupy.cuda.Function
    shared_bytes: int  # dynamic shared memory of a block
    num_multiprocessors: int
    may_overlap: bool  # see `launch`

    def launch(self, grid: int, threads: int, arguments: tuple[Any, ...], stream: int) -> None:
        """Queues the kernel on a CUDA stream (its handle); returns at once."""
        launch(
            self.function.ptr,
            grid,
            threads,
            self.shared_bytes,
            arguments,
            stream,
            overlap=self.may_overlap,
        )


@functools.cache
def load(stem: str, device_index: int, element: torch.dtype) -> Kernel:
    """The kernel ``stem`` of ``cuda/*/<stem>.cu``, compiled for and loaded on a device.

    ``element`` is one of `ELEMENTS`.

    Raises:
        RuntimeError: CuPy is not installed; the source does not compile for the device.
    """
    prepare_cache()
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels need CuPy: {how_to_install('cuda')}; or run without them"
        ) from error
    with cupy.cuda.Device(device_index) as device:
        major, minor = int(device.compute_capability[:-1]), int(device.compute_capability[-1])
        shared_kib = device.attributes["MaxSharedMemoryPerBlockOptin"] // 1024
        source = source_path(stem).read_text(encoding="utf-8")
        options = compile_options(stem, target_of((major, minor)), shared_kib, element)
        with compiled_once(stem, source, options):
            module = cupy.RawModule(code=source, options=options)
            kernel = module.get_function(stem)  # which compiles
        shared_bytes = _shared_bytes(module, stem)
        if shared_bytes > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        num_multiprocessors = device.attributes["MultiProcessorCount"]
        return Kernel(kernel.kernel, shared_bytes, num_multiprocessors, may_overlap=major >= 9)


def _load_like(stem: str, tensor: torch.Tensor) -> Kernel:
    """The kernel for a tensor's device and type; that of bf16 where the tensor is no element."""
    element = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    return load(stem, tensor.get_device(), element)


def load_for(stem: str, tensor: torch.Tensor) -> tuple[Kernel, int]:
    """The kernel for a tensor's device and type, and the handle of the device's current stream."""
    index = tensor.get_device()
    return _load_like(stem, tensor), torch.cuda.current_stream(index).cuda_stream


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's data as a kernel takes it; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def launch_for(stem: str, like: torch.Tensor, grid: int, threads: int, *arguments: Any) -> None:
    """Queues a kernel on the current stream of a tensor's device; returns at once.

    Args:
        stem: of ``cuda/*/<stem>.cu``.
        like: the tensor; where it is fp16, so are the kernel's elements.
        grid: blocks.
        threads: of a block.
        arguments: as `launch` takes them, and tensors and None, which become addresses.
    """
    kernel, stream = load_for(stem, like)
    addresses = tuple(
        pointer(value) if value is None or isinstance(value, torch.Tensor) else value
        for value in arguments
    )
    kernel.launch(grid, threads, addresses, stream)


def grid_size(stem: str, like: torch.Tensor, units: int, each: int = 1) -> int:
    """Blocks of threads for so many units of work: at most ``each`` a multiprocessor."""
    return min(_load_like(stem, like).num_multiprocessors * each, units)


def launch_source(source: Source, like: torch.Tensor, units: int, *arguments: Any) -> None:
    """`launch_for`, of an architecture's kernel, with as many blocks as so many units occupy."""
    grid = grid_size(source.stem, like, units, source.blocks)
    launch_for(source.stem, like, grid, source.threads, *arguments)


def _shared_bytes(module: Any, stem: str) -> int:
    """What the source exports as ``<stem>_shared_bytes``: the size is stated once, there."""
    import cupy
    import numpy as np

    pointer = module.get_global(f"{stem}_shared_bytes")
    return int(cupy.ndarray((1,), np.uint32, pointer)[0])
