"""The process that warm.py forks programs from.

Each connection has one request, a JSON object in a line. It is answered by two numbers: the id of
the process that runs the program and, once that has ended, its exit status.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

IMPORTED = (
    "pandas",
    "pyarrow.parquet",
    "sparsellm.cli.command",
    "sparsellm.training.loop",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
)


NUMBER = struct.Struct("i")


def _serve(listener: socket.socket) -> dict | None:
    """Returns the request in the process that is to run it, and None where there are no more."""
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that started it
    connections: dict[int, socket.socket] = {}  # by the process that was asked for
    while True:
        ready, _, _ = select.select([0, listener, awake], [], [])
        if 0 in ready:
            return None
        if listener in ready:
            connection, _ = listener.accept()
            _import()
            with connection.makefile() as lines:
                request = json.loads(lines.readline())
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.close(awake)
                os.close(wake)
                for each in (listener, connection, *connections.values()):
                    each.close()
                return request
            connections[pid] = connection
            connection.sendall(NUMBER.pack(pid))
        with contextlib.suppress(BlockingIOError):
            os.read(awake, 1000)
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:
                with connections.pop(exited[0]) as connection, contextlib.suppress(OSError):
                    connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(exited[1])))


@functools.cache
def _import() -> None:
    gc.disable()  # modules leave hardly any garbage
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _run(words: list[str], env: dict[str, str], cwd: str, out: str, errors: str) -> None:
    """Becomes the program, in a folder and with files of its own."""
    os.chdir(cwd)
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        (2, errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        os.dup2(os.open(path, mode, 0o600), number)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, encoding="utf-8") for fd in (1, 2))
    become(words, env)


def become(words: list[str], env: dict[str, str]) -> None:
    """Runs the program as this process, to its end."""
    _show(words)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # what the environment says
    sys.modules["sparsellm.processes.ranks"]._PARENT = os.getppid()  # looked up at its import
    if "HF_ENDPOINT" in env:  # read when the hub's client was imported
        importlib.reload(sys.modules["huggingface_hub.constants"])
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:1] = words, [str(Path(words[0]).parent), str(Path(__file__).parent)]
        runpy.run_path(words[0], run_name="__main__")


def _show(words: list[str]) -> None:
    """Has the list of processes show the program's words where it shows those of the server."""
    with contextlib.suppress(OSError):  # only Linux has these files
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # of the words, in memory
        text = "\0".join((sys.executable, *words)).encode() + b"\0"
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    if (request := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(**request)
