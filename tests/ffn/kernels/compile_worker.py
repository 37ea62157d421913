"""One of several processes of test_compile_cache.py: ``compile_worker.py SOURCES LOG [KIND]``.

Compiles kernels (SOURCES: stems of their files, separated by commas) for Hopper as
`sparsellm.ffn.kernels.compile.load` does, through CuPy and its cache on disk. There is no GPU to
load them onto. Each compilation appends a line to LOG. ``stall``: it does not end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from sparsellm.ffn.kernels import compile
from sparsellm.ffn.kernels.compile_cache import compiled_once, prepare_cache


class _NoModule:
    def load(self, cubin: bytes) -> None:
        print(f"{len(cubin)} bytes of machine code", flush=True)

    def _set_mapping(self, mapping: object) -> None:
        pass


def main(sources: str, log: str, kind: str = "") -> None:
    prepare_cache()
    from cupy.cuda import compiler

    real = compiler._compile_using_nvrtc_no_warning

    def compile_using_nvrtc(*arguments):
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        if kind == "stall":
            time.sleep(600)
        return real(*arguments)

    compiler._compile_using_nvrtc_no_warning = compile_using_nvrtc
    compiler.function.Module = _NoModule
    compiler._get_arch_for_options_for_nvrtc = lambda arch: (f"-arch=sm_{arch}", "cubin")
    paths = {path.stem: path for path in compile.sources().values()}
    for stem in sources.split(","):
        source = paths[stem].read_text(encoding="utf-8")
        options = compile.compile_options(paths[stem], "sm90", "sm_90a", 227)
        with compiled_once(stem, source, options):
            compiler._compile_module_with_cache(source, options, arch="90")


if __name__ == "__main__":
    main(*sys.argv[1:])
