"""A kernel is compiled once on a node, by whichever process comes first; real compilations."""

import errno
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import process_env
from filelock import FileLock
from warm import Program

from sparsellm.ffn.kernels.compiler import compile, compile_cache

pytest.importorskip("cuda.pathfinder", reason="CuPy is not installed")
WORKER = Path(__file__).with_name("compile_worker.py")
STEM = "relu_product"


@pytest.fixture
def node(tmp_path):
    """The environment of a node's processes: a cache and temporary files of their own."""
    (tmp_path / "tmp").mkdir()
    folders = {"CUPY_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    return process_env(**folders)


def _start(tmp_path, node, *kind, stems=STEM):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    program = (str(WORKER), stems, str(tmp_path / "log"), *kind)
    return Program(program, node, folder / "printed", folder / "errors")


def _compilations(tmp_path):
    return len((tmp_path / "log").read_text().splitlines())


def _end(process):
    process.wait()
    return process.out.read_text(), process.errors.read_text()


def _all_have_it(processes):
    ends = [_end(process) for process in processes]
    assert all(process.poll() == 0 for process in processes), ends
    assert len({printed for printed, _ in ends}) == 1  # the same machine code
    assert "bytes of machine code" in ends[0][0]
    return "".join(errors for _, errors in ends)


def test_three_processes_compile_a_kernel_once(tmp_path, node):
    warnings = _all_have_it([_start(tmp_path, node) for _ in range(3)])
    assert _compilations(tmp_path) == 1
    assert warnings == ""


@pytest.mark.long
def test_the_installed_cupy_compiles_every_kernel(tmp_path, node):
    """With the NVRTC that it finds: CI runs this with CuPy for CUDA 12 too."""
    stems = {path.stem for path in compile.sources().values()}
    process = _start(tmp_path, node, stems=",".join(stems))
    printed, errors = _end(process)
    assert process.poll() == 0, errors
    assert printed.count("bytes of machine code") == _compilations(tmp_path) == len(stems)


def test_the_lock_of_a_process_that_died_is_free(tmp_path, node):
    killed = _start(tmp_path, node, "stall")
    while not (tmp_path / "log").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    waiting = [_start(tmp_path, node) for _ in range(2)]
    time.sleep(2)
    assert _compilations(tmp_path) == 1
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert _all_have_it(waiting) == ""
    assert _compilations(tmp_path) == 2


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_a_cache_that_cannot_be_written_is_replaced(tmp_path, node):
    folders = ("/proc/nowhere", "/proc")
    two = [_start(tmp_path, node | {"CUPY_CACHE_DIR": folder}) for folder in folders]
    warnings = _all_have_it(two)
    assert _compilations(tmp_path) == 1
    assert all(f"{folder} cannot be written to" in warnings for folder in folders)
    assert warnings.count("set CUPY_CACHE_DIR to a folder that can") == 2


def test_without_a_place_for_files_it_is_compiled_in_memory(tmp_path, node):
    somebodys = tmp_path / "tmp" / f"sparsellm-{os.getuid()}"
    somebodys.mkdir()
    somebodys.chmod(0o777)
    node |= {"CUPY_CACHE_DIR": "/proc/nowhere"}
    two = [_start(tmp_path, node, stems=f"{STEM},transpose") for _ in range(2)]
    assert "compiled again by every process" in _all_have_it(two)
    assert _compilations(tmp_path) == 4


def _compile(code=b"machine code"):
    return lambda: code


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The cache's folder and the node's, new."""
    for name in ("cache", "node"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_node_folder", lambda: tmp_path / "node")
    compile_cache.cache_folder.cache_clear()
    yield tmp_path / "cache", tmp_path / "node"
    compile_cache.cache_folder.cache_clear()


def test_a_process_that_waits_too_long_says_so_and_continues(folders, monkeypatch, capfd):
    monkeypatch.setattr(compile_cache, "WAIT_SECONDS", 0.2)
    _, node = folders

    def compile_meanwhile():
        assert compile_cache.cached("other.cubin", _compile()).read_bytes() == b"machine code"
        assert capfd.readouterr().err == ""  # another kernel is not waited for
        return compile_cache.cached("some.cubin", _compile(b"the second's")).read_bytes()

    assert compile_cache.cached("some.cubin", compile_meanwhile).read_bytes() == b"the second's"
    printed, lock = capfd.readouterr().err, node / "some.cubin.lock"
    assert "for another one to compile some.cubin" in printed
    assert f"(lock {lock}), and compiles it itself" in printed
    with FileLock(lock, timeout=0):  # free again
        pass


def test_a_file_has_its_name_when_it_is_complete(folders, monkeypatch):
    cache, _ = folders
    names = []
    monkeypatch.setattr(os, "fsync", lambda _: names.extend(path.name for path in cache.iterdir()))
    path = compile_cache.cached("some.cubin", _compile())
    assert [path.name for path in cache.iterdir()] == ["some.cubin"]
    assert path.read_bytes() == b"machine code"
    assert len(names) == 1
    assert names[0].startswith("some.cubin.")


def test_a_full_disk_costs_the_cache_alone(folders, monkeypatch, capfd):
    cache, _ = folders

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    first = compile_cache.cached("first.cubin", _compile(b"one"))
    second = compile_cache.cached("second.cubin", _compile(b"two"))
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")
    assert list(cache.iterdir()) == []
    assert f"{cache / 'first.cubin'} cannot be written (No space left" in capfd.readouterr().err


def test_a_name_stands_for_source_headers_options_and_compiler():
    names = {
        compile_cache.file_name(*changed)
        for changed in (
            ("stem", "source", ("-arch=sm_80", "-I/here"), "build 1"),
            ("other", "source", ("-arch=sm_80", "-I/here"), "build 1"),
            ("stem", "another", ("-arch=sm_80", "-I/here"), "build 1"),
            ("stem", "source", ("-arch=sm_90a", "-I/here"), "build 1"),
            ("stem", "source", ("-arch=sm_80", "-I/here"), "build 2"),
        )
    }
    assert len(names) == 5
    elsewhere = compile_cache.file_name("stem", "source", ("-arch=sm_80", "-I/there"), "build 1")
    assert elsewhere in names


def test_a_folder_that_somebody_else_could_have_made_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(tmp_path))
    folder = compile_cache._node_folder()
    assert folder is not None
    assert folder.parent == tmp_path
    folder.chmod(0o777)
    assert compile_cache._node_folder() is None
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert compile_cache._node_folder() is None
