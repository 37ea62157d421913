"""Compiles the kernels under every NVRTC that they must compile under, and reads the machine code.

    python tests/ffn/kernels/nvrtc.py fetch

is what `make test` does first: pip holds one CUDA 12 compiler at a time, so they go into folders.
A compiler runs in a process of its own: some versions crash where others report an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

# CUDA 12 from 12.4 on; the installed one is CUDA 13's.
FETCHED = ("12.4", "12.6", "12.8", "12.9")
FOLDER = Path(sys.prefix) / "nvrtc"


def fetch() -> None:
    """Installs `FETCHED` side by side, each into a folder of its own; those that are there stay."""
    for version in FETCHED:
        if library(version) is None:
            package = f"nvidia-cuda-nvrtc-cu12=={version}.*"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", FOLDER / version, package], check=True)


def library(version: str) -> Path | None:
    """Where one of `FETCHED` lies, or None."""
    return next(iter((FOLDER / version).rglob("libnvrtc.so.12")), None)


def targets_of(nvrtc: Path) -> set[int]:
    """The compute capabilities that a compiler knows, such as 90."""
    command = [sys.executable, __file__, "targets", str(nvrtc)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(child.stdout))


class Job(NamedTuple):
    """A source to compile; one of its options stands for the headers that it includes."""

    stem: str  # of its file
    target: str  # a virtual one, such as compute_120, stops at PTX
    source: str
    options: tuple[str, ...]


def compile_all(nvrtc: Path, jobs: Iterable[Job], cache: Path) -> dict[str, Path]:
    """Machine code by stem, as files; beside each lies its PTX (``.ptx``).

    What was compiled before, by this process or another, is taken from ``cache``.

    Raises:
        AssertionError: a source does not compile; the log, or where the compiler crashed.
    """
    compiled, missing = {}, []
    for job in jobs:
        options = [option for option in job.options if not option.startswith("-I")]
        key = repr((nvrtc.name, nvrtc.stat().st_size, job.stem, job.source, options))
        path = cache / f"{job.stem}.{job.target}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        compiled[job.stem] = path
        if not path.exists():
            missing.append((str(path), job.stem, job.source, job.options))
    if missing:
        command = [sys.executable, __file__, "compile", str(nvrtc)]
        child = subprocess.run(
            command, input=json.dumps(missing), capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stdout + child.stderr
    return compiled


def _print_targets(nvrtc: str) -> None:
    functions, count = ctypes.CDLL(nvrtc), ctypes.c_int()
    functions.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    targets = (ctypes.c_int * count.value)()
    functions.nvrtcGetSupportedArchs(targets)
    print(json.dumps(list(targets)))


def _compile_here(nvrtc: str) -> None:
    # Some versions look for their second half only where the system's libraries are.
    for builtins in Path(nvrtc).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    functions = ctypes.CDLL(nvrtc)
    for path, stem, source, options in json.load(sys.stdin):
        with FileLock(f"{path}.lock"):
            if not Path(path).exists():
                print(f"compiles {path}", flush=True)
                _compile_one(functions, Path(path), stem, source, options)


def _compile_one(
    functions: ctypes.CDLL, path: Path, stem: str, source: str, options: list[str]
) -> None:
    program = ctypes.c_void_p()
    functions.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), f"{stem}.cu".encode(), 0, None, None
    )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if functions.nvrtcCompileProgram(program, len(options), arguments) != 0:
        sys.exit(_result_of(functions, program, "ProgramLog").decode())
    Path(f"{path}.ptx").write_bytes(_result_of(functions, program, "PTX"))
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_bytes(_result_of(functions, program, "CUBIN"))
    partial.replace(path)
    functions.nvrtcDestroyProgram(ctypes.byref(program))


def _result_of(functions: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(functions, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(functions, f"nvrtcGet{kind}")(program, result)
    return result.raw


class Usage(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    registers: int  # per thread, at launch
    frame_bytes: int  # per thread, in local memory: spilled registers, indexed arrays
    static_bytes: int  # of shared memory, per block of threads
    dynamic_bytes: int  # likewise, as the source exports it; 0 where it does not


class Signature(NamedTuple):
    """How a kernel is launched."""

    max_threads: int  # of a block, by its launch bounds
    parameter_bytes: tuple[int, ...]


_REGISTERS, _FRAME_SIZE = 0x2F, 0x11  # attributes of section .nv.info
_MAX_THREADS, _PARAMETER = 0x05, 0x17  # attributes of section .nv.info.<kernel>


def usage_of(cubin: bytes, kernel: str) -> Usage:
    """Read from an ELF file that has the kernel."""
    sections, symbols = _sections(cubin), _symbols(cubin)
    (_, info), found, number = sections[".nv.info"], {}, symbols[kernel][0]
    for attribute, value in _attributes(info):
        if attribute in {_REGISTERS, _FRAME_SIZE}:
            symbol, of_symbol = struct.unpack_from("<II", value)
            if symbol == number:
                found[attribute] = of_symbol
    static, _ = sections.get(f".nv.shared.{kernel}", (0, b""))
    dynamic = exported(cubin, "shared_bytes") if "exported_shared_bytes" in symbols else 0
    return Usage(found[_REGISTERS], found[_FRAME_SIZE], static, dynamic)


def signature_of(cubin: bytes, kernel: str) -> Signature:
    """Read from an ELF file that has the kernel."""
    _, info = _sections(cubin)[f".nv.info.{kernel}"]
    max_threads, sizes = 0, {}
    for attribute, value in _attributes(info):
        if attribute == _MAX_THREADS:
            max_threads = struct.unpack_from("<I", value)[0]
        if attribute == _PARAMETER:
            _, ordinal, _, layout = struct.unpack("<IHHI", value)
            sizes[ordinal] = layout >> 18
    parameter_bytes = tuple(sizes[ordinal] for ordinal in range(len(sizes)))
    return Signature(max_threads, parameter_bytes)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # with a value of `size` bytes: in .nv.info the symbol, and what holds for it
            yield attribute, info[at : at + size]
            at += size


def _sections(elf: bytes) -> dict[str, tuple[int, bytes]]:
    return {name: (size, content) for name, size, content in _section_list(elf)}


def _section_list(elf: bytes) -> list[tuple[str, int, bytes]]:
    """Name, size and content (none of uninitialised memory)."""
    [start] = struct.unpack_from("<Q", elf, 0x28)
    count, of_names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + 64 * i) for i in range(count)]
    names = headers[of_names][4]
    return [
        (
            elf[names + header[0] :].split(b"\0", 1)[0].decode(),
            header[5],
            b"" if header[1] == 8 else elf[header[4] : header[4] + header[5]],
        )
        for header in headers
    ]


def _symbols(elf: bytes) -> dict[str, tuple[int, int, int]]:
    """Number, section and value of each symbol."""
    by_name = {name: content for name, _, content in _section_list(elf)}
    symbols, names = by_name[".symtab"], by_name[".strtab"]
    found = {}
    for at in range(0, len(symbols), 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", symbols, at)
        found[names[name:].split(b"\0", 1)[0].decode()] = (at // 24, section, value)
    return found


def exported(cubin: bytes, name: str) -> int:
    """The number that a source exports as ``exported_<name>``."""
    _, section, value = _symbols(cubin)[f"exported_{name}"]
    _, _, content = _section_list(cubin)[section]
    return struct.unpack_from("<I", content, value)[0] if content else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch"]:
            fetch()
        case ["targets", library_path]:
            _print_targets(library_path)
        case ["compile", library_path]:
            _compile_here(library_path)
