"""SPARSELLM_DEBUG, on real compilations."""

import shutil
from pathlib import Path

import pytest
from conftest import process_env
from warm import Program

from ffn.kernels import nvrtc
from sparsellm.ffn.kernels.compiler import debug

pytest.importorskip("cuda.pathfinder", reason="CuPy is not installed")
WORKER = Path(__file__).with_name("compile_worker.py")


def _compile(folder, knobs):
    """The exit status, and what is printed to standard error."""
    environment = process_env(CUPY_CACHE_DIR=str(folder), SPARSELLM_DEBUG=knobs)
    words = (str(WORKER), "transpose", str(folder / "log"))
    process = Program(words, environment, folder / "printed", folder / "errors")
    return process.wait(), (folder / "errors").read_text()


def _sections(folder):
    [cubin] = folder.glob("*.cubin")
    return {name: content for name, _, content in nvrtc._section_list(cubin.read_bytes())}


def test_what_the_knobs_print_and_write(tmp_path):
    (with_knobs := tmp_path / "with").mkdir()
    (without := tmp_path / "without").mkdir()
    status, errors = _compile(with_knobs, "config, lineinfo,ptx,spills")
    assert status == 0, errors
    lines = errors.splitlines()
    assert all(line.startswith("SPARSELLM_DEBUG: ") for line in lines)
    assert "transpose.cu: NVRTC 13" in lines[0]
    assert "-arch=sm_90a" in lines[0]
    assert "Compiling entry function 'transpose' for 'sm_90a'" in errors
    assert "0 bytes spill stores" in errors
    [ptx] = with_knobs.glob("*.ptx")
    assert lines[-1] == f"SPARSELLM_DEBUG: {ptx}"
    assert ".entry transpose(" in ptx.read_text()
    assert ".loc" in ptx.read_text()

    assert _compile(without, "") == (0, "")
    with_sections, plain = _sections(with_knobs), _sections(without)
    assert ".debug_line" in with_sections.keys() - plain.keys()
    assert with_sections[".text.transpose"] == plain[".text.transpose"]


def test_a_knob_that_is_not_there(tmp_path):
    status, errors = _compile(tmp_path, "ptx,asm")
    assert status != 0
    assert "SPARSELLM_DEBUG: asm; it takes config, lineinfo, ptx, sass, spills" in errors


def test_sass_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ValueError, match="sass needs nvdisasm, of the CUDA toolkit or of Triton"):
        debug._disassembler()
