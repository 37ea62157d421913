"""Every kernel compiles, with the options that the GPU's owner will use; needs no GPU."""

from __future__ import annotations

import pytest

from sparsellm.kernels import compile
from sparsellm.paths import bundled

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
STEMS = sorted(path.stem for path in bundled("cuda").glob("*.cu"))


@pytest.mark.parametrize("stem", STEMS)
def test_compiles_for_hopper(stem):
    source = compile.source_path(stem).read_text()
    program = nvrtc.createProgram(source, f"{stem}.cu", [], [])
    try:
        # CuPy adds -ftz=true.
        nvrtc.compileProgram(program, [*compile.compile_options(stem, "sm_90a"), "-ftz=true"])
        assert len(nvrtc.getCUBIN(program)) > 1000
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_a_changed_header_changes_the_options(tmp_path, monkeypatch):
    for path in bundled("cuda").glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(compile, "bundled", lambda folder: tmp_path)
    before = {stem: compile.compile_options(stem, "sm_90a") for stem in STEMS}
    header = tmp_path / "ptx.cuh"  # included by every kernel, by some through other headers
    header.write_text(header.read_text() + "// changed\n")
    for stem in STEMS:
        assert compile.compile_options(stem, "sm_90a") != before[stem]
