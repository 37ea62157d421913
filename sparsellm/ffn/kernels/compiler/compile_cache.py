"""Machine code on disk: one process of a node compiles a kernel, the others wait and read it.

It lies in CuPy's folder (``CUPY_CACHE_DIR``, default ``~/.cupy/kernel_cache``), which may be on a
file system that nodes share. A file is complete as soon as it has its name. Locks lie in a folder
local to the node: without them eight ranks that start together compile every kernel eight times,
and with locks in a shared folder a node would wait for another one that has failed.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sparsellm.waiting import warn

CACHE_VARIABLE = "CUPY_CACHE_DIR"
# Longer than any kernel takes to compile on a busy node. The holder of a lock may be suspended, so
# nobody waits for ever.
WAIT_SECONDS = 600.0


def file_name(stem: str, source: str, options: tuple[str, ...], build: str) -> str:
    """The name of a source's machine code. Include folders do not affect it; put a digest of the
    headers into the source or the options.

    Args:
        stem: of the source's file.
        source: its text.
        options: the compiler's.
        build: the compiler's version, exactly.
    """
    key = [source, build, *(option for option in options if not option.startswith("-I"))]
    return f"sparsellm-{stem}-{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:24]}.cubin"


def cached(name: str, compile: Callable[[], bytes]) -> Path:
    """The file of a kernel's machine code, compiled if no process has done so before.

    Where no file can be written, it lies in this process's memory, and the path leads there.

    Args:
        name: see `file_name`.
        compile: returns the machine code.
    """
    folder = cache_folder()
    if folder is None:
        return _in_memory(name, compile())
    path = folder / name
    if not path.exists():
        with _locked(name):
            if not path.exists():
                code = compile()
                try:
                    _write(path, code)
                except OSError as error:
                    warn(f"{path} cannot be written ({error.strerror or error}); not cached")
                    return _in_memory(name, code)
    return path


def _write(path: Path, code: bytes) -> None:
    """Under its name the file is complete, also after the node has crashed."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        try:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _in_memory(name: str, code: bytes) -> Path:
    # It stays open: a path names one kernel as long as the process lives.
    descriptor = os.memfd_create(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(code)
    return Path(f"/proc/self/fd/{descriptor}")


@functools.cache
def cache_folder() -> Path | None:
    """Where this process can keep machine code; called before CuPy is imported. None: nowhere.

    CuPy cannot be imported where its folder can neither be made nor written to: a home that is
    read-only or missing. A folder of this user below the node's temporary files takes its place,
    for this process and those that it starts.
    """
    folder = Path(os.environ.get(CACHE_VARIABLE) or "~/.cupy/kernel_cache")
    reason = _why_unusable(folder)
    if reason is None:
        return folder.expanduser().absolute()
    of_node = _node_folder()
    if of_node is None:
        os.environ[CACHE_VARIABLE] = os.sep  # CuPy is content if it exists
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        substitute, place = None, "in memory, and compiled again by every process"
    else:
        substitute = of_node / "kernel_cache"
        substitute.mkdir(exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(substitute)
        place = f"in {substitute}"
    warn(
        f"compiled kernels are kept {place}: {folder} cannot be written to ({reason}); "
        f"set {CACHE_VARIABLE} to a folder that can"
    )
    return substitute


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Holds the lock of one kernel on this node.

    The lock ends with the process that holds it, however it ends. After `WAIT_SECONDS`, or where
    there is no place for locks, the body runs without it: it then compiles what another process may
    be compiling too.
    """
    folder = _node_folder()
    if folder is None:
        yield
        return
    lock = FileLock(folder / f"{name}.lock", mode=0o600)
    began = time.monotonic()
    try:
        lock.acquire(timeout=WAIT_SECONDS)
    except Timeout:
        warn(
            f"process {os.getpid()} has waited {time.monotonic() - began:.0f} s for another one to "
            f"compile {name} (lock {lock.lock_file}), and compiles it itself"
        )
    except OSError as error:
        warn(f"{name} is compiled without a lock: {error}")
    try:
        yield
    finally:
        lock.release()


def _node_folder() -> Path | None:
    """A folder of this user alone on this node; None where there can be none."""
    try:
        folder = Path(tempfile.gettempdir()) / f"sparsellm-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    # Machine code is read from there: nobody else may have made it.
    private = (
        status.st_uid == os.getuid() and not status.st_mode & 0o022 and not folder.is_symlink()
    )
    return folder if private and _why_unusable(folder) is None else None


def _why_unusable(folder: Path) -> str | None:
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
    except RuntimeError as error:  # there is no home
        return str(error)
