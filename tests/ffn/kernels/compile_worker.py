"""One of several processes of test_compile_cache.py: ``compile_worker.py SOURCES LOG [KIND]``.

Compiles kernels (SOURCES: stems of their files, separated by commas) for Hopper as
`sparsellm.ffn.kernels.compiler.compile.load` does. There is no GPU to load them onto. Each
compilation appends a line to LOG. ``stall``: it does not end.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

from sparsellm.ffn.kernels.compiler import compile, nvrtc
from sparsellm.ffn.kernels.compiler.compile_cache import cache_folder


def main(sources: str, log: str, kind: str = "") -> None:
    cache_folder()
    import cupy  # for its own folder  # noqa: F401

    compiler = nvrtc.installed()
    real = compiler.compile

    def logged(source: str, name: str, options: tuple[str, ...]) -> bytes:
        if source:  # not for the compiler's version
            with Path(log).open("a") as file:
                file.write(f"{os.getpid()}\n")
            if kind == "stall":
                time.sleep(600)
        return real(source, name, options)

    compiler.compile = logged  # type: ignore[method-assign]
    paths = {path.stem: path for path in compile.sources().values()}
    for stem in sources.split(","):
        options = compile.compile_options(paths[stem], "sm90", "sm_90a", 227)
        code = compile.machine_code(compiler, paths[stem], options).read_bytes()
        print(f"{len(code)} bytes of machine code {hashlib.sha256(code).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
