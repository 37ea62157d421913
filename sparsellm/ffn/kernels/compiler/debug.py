"""``SPARSELLM_DEBUG``: what is printed and kept of the kernels as they are compiled and loaded.

A comma-separated list:

config    prints each source's options and file, and each kernel's threads, registers and memory
lineinfo  compiles with line numbers for profilers; the machine code stays the same
ptx       writes PTX beside the machine code, and prints where
sass      the same of SASS, by nvdisasm of the CUDA toolkit or of Triton
spills    prints what ptxas says of each kernel: registers, barriers, spilled bytes
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sparsellm.ffn.kernels.compiler.nvrtc import NVRTC

VARIABLE = "SPARSELLM_DEBUG"
KNOBS = ("config", "lineinfo", "ptx", "sass", "spills")


@functools.cache
def knobs() -> frozenset[str]:
    """Those that the environment variable names, as it was first read.

    Raises:
        ValueError: there is none of that name.
    """
    named = {word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()}
    unknown = sorted(named.difference(KNOBS))
    if unknown:
        raise ValueError(f"{VARIABLE}: {', '.join(unknown)}; it takes {', '.join(KNOBS)}")
    return frozenset(named)


def compile_options() -> tuple[str, ...]:
    """What the knobs add to a kernel's options."""
    return ("-lineinfo",) if "lineinfo" in knobs() else ()


def print_lines(text: str) -> None:
    """To standard error, with the variable's name before each line."""
    for line in text.splitlines():
        print(f"{VARIABLE}: {line}", file=sys.stderr, flush=True)


def report(compiler: NVRTC, source: Path, options: tuple[str, ...], cubin: Path) -> None:
    """Prints and writes what the knobs ask of a source that has been compiled to ``cubin``.

    Raises:
        ValueError: there is no nvdisasm, or no folder to write to.
    """
    enabled = knobs()
    if "config" in enabled:
        print_lines(f"{source.name}: NVRTC {compiler.version} {' '.join(options)}: {cubin}")
    text = source.read_text(encoding="utf-8")
    if "spills" in enabled:
        print_lines(compiler.log_of(text, source.name, (*options, "--ptxas-options=-v")))
    if "ptx" in enabled:
        virtual = [re.sub("^-arch=sm_", "-arch=compute_", option) for option in options]
        _write(cubin.with_suffix(".ptx"), compiler.compile(text, source.name, virtual))
    if "sass" in enabled:
        lines = ["--print-line-info"] if "lineinfo" in enabled else []
        command = [_disassembler(), *lines, str(cubin)]
        _write(
            cubin.with_suffix(".sass"),
            subprocess.run(command, capture_output=True, check=True).stdout,
        )


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(
            f"{VARIABLE}: {path} cannot be written ({error.strerror}); set CUPY_CACHE_DIR to a "
            "folder that can"
        ) from error
    print_lines(str(path))


def _disassembler() -> str:
    candidates = [shutil.which("nvdisasm")]
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        candidates.append(shutil.which("nvdisasm", path=f"{folder}/backends/nvidia/bin"))
    present = next((path for path in candidates if path), None)
    if present is None:
        raise ValueError(f"{VARIABLE}=sass needs nvdisasm, of the CUDA toolkit or of Triton")
    return present
