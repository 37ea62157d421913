"""One process of a node compiles a kernel; the others wait for it and read it from disk.

CuPy keeps machine code in a folder (``CUPY_CACHE_DIR``, default ``~/.cupy/kernel_cache``). Without
a lock, eight ranks that start together find it empty together and compile every kernel eight times.
Locks lie in a folder local to the node: if the cache is on a shared file system, each node compiles
once, and no node waits for another one that has failed.
"""

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

CACHE_VARIABLE = "CUPY_CACHE_DIR"
# Longer than any kernel takes to compile on a busy node. The holder of a lock may be suspended, so
# nobody waits for ever.
WAIT_SECONDS = 600.0


@functools.cache
def prepare_cache() -> None:
    """Has CuPy keep machine code where this process can write; called before CuPy is imported.

    CuPy fails where its folder can neither be made nor written to: a home that is read-only or
    missing. A folder of this user below the node's temporary files takes its place, for this
    process and those that it starts.
    """
    folder = Path(os.environ.get(CACHE_VARIABLE) or "~/.cupy/kernel_cache")
    reason = _why_unusable(folder)
    if reason is None:
        return
    own = _node_folder()
    if own is None or "cupy" in sys.modules:  # CuPy reads the variable when it is imported
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        kept = "in memory, and compiled again by every process"
    else:
        os.environ[CACHE_VARIABLE] = str(own / "kernel_cache")
        kept = f"in {own / 'kernel_cache'}"
    _warn(
        f"compiled kernels are kept {kept}: {folder} cannot be written to ({reason}); "
        f"set {CACHE_VARIABLE} to a folder that can"
    )


@contextlib.contextmanager
def compiled_once(stem: str, source: str, options: tuple[str, ...]) -> Iterator[None]:
    """Holds the lock of one kernel on this node. The body compiles it, or reads it from the cache.

    The lock ends with the process that holds it, however it ends. After `WAIT_SECONDS`, or where
    there is no place for locks, the body runs without it: it then compiles what another process may
    be compiling too.
    """
    own = _node_folder()
    if own is None:
        yield
        return
    digest = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()[:16]

    lock = FileLock(own / f"{stem}-{digest}.lock", mode=0o600)
    began = time.monotonic()
    try:
        lock.acquire(timeout=WAIT_SECONDS)
    except Timeout:
        _warn(
            f"process {os.getpid()} has waited {time.monotonic() - began:.0f} s for another one to "
            f"compile the kernel {stem} (lock {lock.lock_file}), and compiles it itself"
        )
    except OSError as error:
        _warn(f"kernel {stem} is compiled without a lock: {error}")
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


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
