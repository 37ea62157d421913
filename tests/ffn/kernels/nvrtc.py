"""Compiles the kernels under every NVRTC that they must compile under, and reads the machine code.

    python tests/ffn/kernels/nvrtc.py fetch

is what `make test` does first: pip holds one CUDA 12 compiler at a time, so they go into folders.
A compiler runs in a process of its own: some versions crash where others report an error.
"""

import functools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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


class Compiler(NamedTuple):
    """What `sparsellm.ffn.kernels.compiler.nvrtc.NVRTC` says of a library."""

    version: str
    build: str
    capabilities: list[int]


@functools.cache
def compiler(nvrtc: Path) -> Compiler:
    """Asks a library."""
    command = [sys.executable, __file__, "describe", str(nvrtc)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return Compiler(*json.loads(child.stdout))


class Job(NamedTuple):
    """A source to compile; one of its options stands for the headers that it includes."""

    stem: str  # of its file
    source: str
    options: tuple[str, ...]


def compile_all(nvrtc: Path, jobs: Iterable[Job], cache: Path) -> dict[str, Path]:
    """Machine code by stem, as files; beside each one its PTX, which has the suffix ``.ptx``.

    They are compiled and cached as for users, in the folder ``cache``.

    Raises:
        AssertionError: a source does not compile; the log, or where the compiler crashed.
    """
    from sparsellm.ffn.kernels.compiler.compile_cache import file_name

    build, compiled, missing = compiler(nvrtc).build, {}, []
    for job in jobs:
        compiled[job.stem] = cache / file_name(*job, build)
        if not compiled[job.stem].exists():
            missing.append(job)
    if missing:
        child = subprocess.run(
            [sys.executable, __file__, "compile", str(nvrtc)],
            input=json.dumps(missing),
            env=os.environ | {"CUPY_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stdout + child.stderr
    assert all(path.exists() for path in compiled.values())
    return compiled


def _describe(nvrtc: str) -> None:
    from sparsellm.ffn.kernels.compiler.nvrtc import NVRTC

    nvrtc_compiler = NVRTC(Path(nvrtc))
    print(json.dumps([nvrtc_compiler.version, nvrtc_compiler.build, nvrtc_compiler.capabilities]))


def _compile_here(nvrtc: str) -> None:
    from sparsellm.ffn.kernels.compiler.compile_cache import cache_folder, cached, file_name
    from sparsellm.ffn.kernels.compiler.nvrtc import NVRTC

    class KeepsPTX(NVRTC):
        def _output(self, program, kind):
            if kind == "CUBIN":
                self.ptx = super()._output(program, "PTX").rstrip(b"\0")
            return super()._output(program, kind)

    used = KeepsPTX(Path(nvrtc))

    def compile_both(name, source, stem, options):
        code = used.compile(source, f"{stem}.cu", options)
        (cache_folder() / name).with_suffix(".ptx").write_bytes(used.ptx)
        return code

    for stem, source, options in json.load(sys.stdin):
        print(f"compiles {stem}", flush=True)
        name = file_name(stem, source, options, used.build)
        cached(name, functools.partial(compile_both, name, source, stem, options))


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
    (_, info), usage, number = sections[".nv.info"], {}, symbols[kernel][0]
    for attribute, value in _attributes(info):
        if attribute in {_REGISTERS, _FRAME_SIZE}:
            symbol, of_symbol = struct.unpack_from("<II", value)
            if symbol == number:
                usage[attribute] = of_symbol
    static, _ = sections.get(f".nv.shared.{kernel}", (0, b""))
    dynamic = exported(cubin, "shared_bytes") if "exported_shared_bytes" in symbols else 0
    return Usage(usage[_REGISTERS], usage[_FRAME_SIZE], static, dynamic)


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
    numbers = {}
    for at in range(0, len(symbols), 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", symbols, at)
        numbers[names[name:].split(b"\0", 1)[0].decode()] = (at // 24, section, value)
    return numbers


def exported(cubin: bytes, name: str) -> int:
    """The number that a source exports as ``exported_<name>``."""
    _, section, value = _symbols(cubin)[f"exported_{name}"]
    _, _, content = _section_list(cubin)[section]
    return struct.unpack_from("<I", content, value)[0] if content else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch"]:
            fetch()
        case ["describe", library_path]:
            _describe(library_path)
        case ["compile", library_path]:
            _compile_here(library_path)
