"""Compiles ``cuda/*/*.cu`` for the GPU at hand with NVRTC, once per node, and loads it with CuPy.

Machine code is kept on disk (`compile_cache`) under a key of source, options and compiler. A digest
of the included headers is among the options.

A source has one or more kernels. It, or a header, exports the numbers that Python needs as
``exported_<name>``, so that each is stated once: ``shared_bytes``, the dynamic shared memory of a
block, if there is any; ``blocks``, how many run on a multiprocessor at a time; sizes of tiles and
so on.
"""

import functools
import hashlib
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import calculate_time_spent

from sparsellm.ffn.activations import RECTIFIED
from sparsellm.ffn.kernels.compiler import debug, nvrtc
from sparsellm.ffn.kernels.compiler.compile_cache import cache_folder, cached, file_name
from sparsellm.ffn.kernels.compiler.gpu_architecture import architecture_of, target_of
from sparsellm.ffn.kernels.launch import Kernel, Layout, kernels_of
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
    *,
    fp8: bool = False,
) -> tuple[str, ...]:
    """NVRTC options.

    Args:
        source: one of `sources`.
        folder: the architecture's folder, whose headers the source includes.
        target: such as ``sm_90a``.
        shared_kib: shared memory that a block of threads can have, in KiB.
        element: one of `ELEMENTS`, see ``cuda/common/element.cuh``.
        activation, fp8: see `kernel_for`.
    """
    defined = []
    if activation != "relu":  # what sources compute without further options
        rectified = RECTIFIED[activation]
        defined = [
            f"SPARSELLM_VALUE={rectified.device_value}",
            f"SPARSELLM_SLOPE={rectified.device_slope}",
            f"SPARSELLM_INVERSE={rectified.device_inverse}",
        ]
    if element == torch.float16:
        defined.append("SPARSELLM_FP16")
    if fp8:
        defined.append("SPARSELLM_E4M3")
    return (
        f"-arch={target}",
        "-std=c++17",
        "-ftz=true",  # subnormal numbers count as zero
        *(f"-I{path}" for path in (bundled("cuda"), bundled("cuda") / folder)),
        f"-DSPARSELLM_SHARED_KIB={shared_kib}",
        *(f"-D{macro}" for macro in defined),
        f"-DSPARSELLM_HEADERS={_headers_digest(source, folder)}",
    )


def _headers_digest(source: Path, folder: str) -> str:
    headers = sorted(included(source, folder))
    return hashlib.sha256(b"".join(header.read_bytes() for header in headers)).hexdigest()[:16]


def included(source: Path, folder: str) -> set[Path]:
    """All headers that a source includes, directly or not."""
    headers: set[Path] = set()
    pending = [source]
    while pending:
        text = pending.pop().read_text(encoding="utf-8")
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            header = bundled("cuda") / (name if "/" in name else f"{folder}/{name}")
            if header not in headers:
                headers.add(header)
                pending.append(header)
    return headers


_SECONDS: list[float] = []  # per source: to compile it, read it from disk, or wait for it


def compile_seconds() -> float:
    """Seconds in which this process has waited for compilation: of kernels here, and of graphs.

    For torch.compile's graphs it is what `calculate_time_spent` counts: tracing, code generation
    and waiting for compilers, in forward and backward passes.
    """
    graphs: float = calculate_time_spent()["total_wall_time"]
    return graphs + sum(_SECONDS)


def machine_code(compiler: nvrtc.NVRTC, source: Path, options: tuple[str, ...]) -> Path:
    """The file of a source's machine code, from the cache or compiled now.

    Args:
        compiler: such as `nvrtc.installed`.
        source: one of `sources`.
        options: see `compile_options`.

    Raises:
        RuntimeError: it does not compile.
    """
    text, options = source.read_text(encoding="utf-8"), (*options, *debug.compile_options())
    path = cached(
        file_name(source.stem, text, options, compiler.build),
        lambda: compiler.compile(text, source.name, options),
    )
    debug.report(compiler, source, options, path)
    return path


def device_code(  # noqa: PLR0917
    path: Path, folder: str, device_index: int, element: torch.dtype, activation: str, fp8: bool
) -> Path:
    """The file of a source's machine code for a GPU; arguments are those of `load`.

    Raises:
        RuntimeError: CuPy or NVRTC is not installed; the source does not compile.
    """
    cache_folder()  # before CuPy looks for it
    try:
        import cupy

        compiler = nvrtc.installed()
    except ImportError as error:
        remedy = how_to_install_cuda(torch.version.cuda)
        raise RuntimeError(
            f"the CUDA kernels need CuPy and NVRTC: {remedy}; or run without them"
        ) from error
    device = cupy.cuda.Device(device_index)
    major, minor = int(device.compute_capability[:-1]), int(device.compute_capability[-1])
    shared_kib = device.attributes["MaxSharedMemoryPerBlockOptin"] // 1024
    target = target_of((major, minor), compiler.capabilities)
    options = compile_options(path, folder, target, shared_kib, element, activation, fp8=fp8)
    return machine_code(compiler, path, options)


@functools.cache
def _module(  # noqa: PLR0917
    path: Path, folder: str, device_index: int, element: torch.dtype, activation: str, fp8: bool
) -> Any:
    began = time.perf_counter()
    code = device_code(path, folder, device_index, element, activation, fp8)
    import cupy

    with cupy.cuda.Device(device_index):
        module = cupy.RawModule(path=str(code))
    _SECONDS.append(time.perf_counter() - began)
    return module


def kernel_for(
    kernel: str, like: torch.Tensor, activation: str = "relu", *, fp8: bool = False
) -> Kernel:
    """A kernel, compiled for a tensor's device and for fp16 if the tensor is fp16, else bf16.

    Args:
        kernel: its name.
        like: the tensor.
        activation: a name of `activations.ACTIVATIONS` that has kernels; for kernels whose source
            includes ``cuda/common/activation.cuh``.
        fp8: the gate's weights are e4m3; for the kernels that compute a gate.

    Raises:
        RuntimeError: CuPy or NVRTC is not installed; the source does not compile.
        ValueError: NVRTC is too old for the device.
    """
    element = torch.float16 if like.dtype == torch.float16 else torch.bfloat16
    index = like.get_device()
    return load(kernel, architecture_of(index).folder, index, element, activation, fp8)


@functools.cache
def load(  # noqa: PLR0917
    kernel: str,
    folder: str,
    device_index: int,
    element: torch.dtype,
    activation: str = "relu",
    fp8: bool = False,
) -> Kernel:
    """`kernel_for` by the architecture's folder, device and type, one of `ELEMENTS`."""
    path = sources()[kernel]
    module = _module(path, folder, device_index, element, activation, fp8)
    import cupy
    import numpy as np

    @functools.cache
    def exported(name: str) -> int:
        with cupy.cuda.Device(device_index):
            return int(cupy.ndarray((1,), np.uint32, module.get_global(f"exported_{name}"))[0])

    source = path.read_text(encoding="utf-8")
    texts = [source, *(header.read_text(encoding="utf-8") for header in included(path, folder))]
    with cupy.cuda.Device(device_index) as device:
        function = module.get_function(kernel)
        # Beyond 48 KiB a kernel gets shared memory only if the driver is told once.
        is_dynamic = any("exported_shared_bytes" in text for text in texts)
        shared_bytes = exported("shared_bytes") if is_dynamic else 0
        if shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared_bytes
        if "config" in debug.knobs():
            debug.print_lines(
                f"{kernel}: {function.max_threads_per_block} threads, {function.num_regs} "
                f"registers, {function.local_size_bytes} bytes of local memory, of shared memory "
                f"{function.shared_size_bytes} static and {shared_bytes} dynamic"
            )
        return Kernel(
            function=function.kernel,
            layout=Layout(kernel, kernels_of(source)[kernel]),
            threads=function.max_threads_per_block,
            shared_bytes=shared_bytes,
            exported=exported,
            device_index=device_index,
            num_multiprocessors=device.attributes["MultiProcessorCount"],
            may_overlap=int(device.compute_capability[:-1]) >= 9,
        )
