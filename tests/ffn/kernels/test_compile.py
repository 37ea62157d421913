"""Every kernel compiles, with the options that the GPU's owner will use; needs no GPU."""

from __future__ import annotations

import shutil

import pytest

from sparsellm.ffn.kernels import compile
from sparsellm.paths import bundled

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
STEMS = list(compile.sources())
# One of each generation that a portable kernel is for; sm_86 and 89 run what sm_80 compiles.
PORTABLE_TARGETS = ["sm_80", "sm_90a", "sm_100", "sm_120"]


def _targets(stem):
    """wgmma exists on Hopper alone (Blackwell dropped it), so these compile for it alone."""
    return ["sm_90a"] if compile.source_path(stem).parent.name == "sm90" else PORTABLE_TARGETS


@pytest.mark.parametrize(
    ("stem", "target"), [(stem, target) for stem in STEMS for target in _targets(stem)]
)
def test_compiles(stem, target):
    source = compile.source_path(stem).read_text()
    program = nvrtc.createProgram(source, f"{stem}.cu", [], [])
    try:
        # CuPy adds -ftz=true.
        nvrtc.compileProgram(program, [*compile.compile_options(stem, target), "-ftz=true"])
        assert len(nvrtc.getCUBIN(program)) > 1000
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_every_gpu_since_ampere_has_the_kernels_of_an_ffn():
    portable = {stem for stem in STEMS if len(_targets(stem)) > 1}
    assert portable >= {"pack_union", "union_entries", "portable_up", "portable_down"}


def test_a_changed_header_changes_the_options(tmp_path, monkeypatch):
    copy = shutil.copytree(bundled("cuda"), tmp_path / "cuda")
    monkeypatch.setattr(compile, "bundled", lambda folder: copy)
    monkeypatch.setattr(compile, "source_path", lambda stem: compile.sources()[stem])
    before = {stem: compile.compile_options(stem, "sm_90a") for stem in STEMS}
    header = copy / "common" / "ptx.cuh"  # included by every kernel, by some through other headers
    header.write_text(header.read_text() + "// changed\n")
    for stem in STEMS:
        assert compile.compile_options(stem, "sm_90a") != before[stem]


def test_the_digest_covers_every_header():
    headers = set(bundled("cuda").rglob("*.cuh"))
    assert set().union(*(compile._included(compile.source_path(stem)) for stem in STEMS)) == headers


@pytest.mark.parametrize("stem", STEMS)
def test_waits_for_the_kernel_before(stem):
    """Launches overlap: a kernel that does not wait reads what is not written yet."""
    path = compile.source_path(stem)
    texts = [path.read_text(), *(h.read_text() for h in compile._included(path))]
    assert any("await_previous_kernel();\n" in text for text in texts)
