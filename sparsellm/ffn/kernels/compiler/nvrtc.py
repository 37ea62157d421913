"""NVRTC, NVIDIA's compiler at run time: from the text of a source to machine code.

It is called directly, and not through CuPy, which appends an ``-arch`` of its own to the options
that it is passed: NVRTC before 12.9 refuses a second one, and CuPy's lacks ``sm_90a``.
Nothing here needs torch or a GPU.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

_SUCCESS = 0


class NVRTC:
    """One version of the compiler.

    Args:
        library: its shared library, such as ``libnvrtc.so.12``.

    Raises:
        OSError: the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        # Some versions look for their second half only where the system's libraries are.
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @functools.cached_property
    def version(self) -> str:
        """Such as ``12.8``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    @functools.cached_property
    def build(self) -> str:
        """What the compiler says of itself in its output; differs between builds of one version."""
        ptx = self.compile("", "build.cu", ()).decode()
        return "\n".join(line for line in ptx.splitlines() if line.startswith("//"))

    @functools.cached_property
    def capabilities(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        supported = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", supported)
        return tuple(supported)

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Machine code; PTX if the target among the options is a virtual one, or if there is none.

        Args:
            source: the text.
            name: of the source's file, for errors and line numbers.
            options: NVRTC's, such as ``-arch=sm_90a``.

        Raises:
            RuntimeError: the source does not compile; with the compiler's log.
        """
        code, _ = self._run(source, name, options)
        return code

    def log_of(self, source: str, name: str, options: Sequence[str]) -> str:
        """What the compiler prints; arguments and errors are those of `compile`."""
        _, log = self._run(source, name, options)
        return log

    def _run(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            *(ctypes.byref(program), source.encode(), name.encode(), 0, None, None),
        )
        try:
            encoded = [option.encode() for option in options]
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            result = self._library.nvrtcCompileProgram(program, len(encoded), array)
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if result != _SUCCESS:
                raise RuntimeError(
                    f"NVRTC {self.version} does not compile {name} with {' '.join(options)}:\n{log}"
                )
            code = self._output(program, "CUBIN") or self._output(program, "PTX").rstrip(b"\0")
            return code, log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        output = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, output)
        return output.raw

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != _SUCCESS:
            reason = self._library.nvrtcGetErrorString(result).decode()
            raise RuntimeError(f"{function} failed: {reason}")


@functools.cache
def installed() -> NVRTC:
    """The version that CuPy uses too.

    Raises:
        ImportError: none is installed.
    """
    from cuda import pathfinder  # type: ignore[attr-defined]  # a dependency of CuPy's

    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except pathfinder.DynamicLibNotFoundError as error:
        raise ImportError("NVRTC is not installed") from error
    assert library is not None  # it always has a path on Linux
    return NVRTC(Path(library))
