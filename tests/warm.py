"""Python programs that begin with torch imported: forked from a process that imported it once.

A rank of a training run takes five seconds of CPU to import torch and transformers, and one to
train. Tests of what ranks compute start them here without a launcher; tests of how they are watched
and ended have one (warm_launch.py) that forks them where torchrun starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT, completed, process_env
from warm_server import NUMBER

ADDRESS = "SPARSELLM_TEST_SERVER"  # set where there is one


def ranks(
    number: int, *program: str, config: str = "", status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program (a script or ``-m module``, with its arguments) on so many ranks to its end.

    It ends with 1 where one of them fails; see `completed`.

    They have the environment that ``accelerate launch`` would give them by a file of launch/; their
    rendezvous is in this process, as it is in torchrun's.
    """
    import torch.distributed as dist

    env, store = process_env(), None
    if number > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env |= _environment(config or "ddp8.yaml", number)
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        env |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if config in ("fsdp2.yaml", "hsdp.yaml"):
        program = (str(ROOT / "tests" / "training" / "fsdp_on_cpu.py"), *program)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        started = []
        for rank in range(number):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if number > 1 else {}
            started.append(Program(program, env | variables, out, errors))
        ended = _wait_for(started)
        return completed(program, ended, out.read_text(), errors.read_text(), status)


def run(
    *program: str, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, with these variables added to its environment; see `completed`."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        ended = Program(program, process_env(**environment), out, errors).wait()
        return completed(program, ended, out.read_text(), errors.read_text(), status)


def launched(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs ``accelerate launch`` with two ranks to its end; without CUDA they talk over gloo.

    See `completed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        words = ("--main_process_port=0", "--num_processes=2", *arguments)
        process = launch(2, *words, out=out, errors=errors)
        try:
            ended = process.wait()
        finally:
            process.send_signal(signal.SIGKILL)
        return completed(arguments, ended, out.read_text(), errors.read_text(), status)


def launch(number: int, *arguments: str, out: Path, errors: Path) -> Program:
    """Starts ``accelerate launch`` with ``launch/ddp8.yaml`` for so many ranks of this node."""
    config = f"--config_file={ROOT / 'launch' / 'ddp8.yaml'}"
    program = (str(ROOT / "tests" / "warm_launch.py"), str(number), config, *arguments)
    return Program(program, process_env(), out, errors)


def _wait_for(started: list[Program]) -> int:
    """1 where one failed, whose others then have half a minute to end by themselves."""
    failed_at = None
    while any(program.poll() is None for program in started):
        if failed_at is None and any(program.poll() for program in started):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + 30:
            for program in started:
                program.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    return int(any(program.poll() for program in started))


def _environment(config: str, number: int) -> dict[str, str]:
    """What ``accelerate launch`` adds."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = [f"--config_file={ROOT / 'launch' / config}", f"--num_processes={number}"]
    if config == "hsdp.yaml":  # two "nodes" of this machine's processes
        words += ["--num_machines=1", "--parallelism_config_dp_replicate_size=2"]
        words.append(f"--parallelism_config_dp_shard_size={number // 2}")
    arguments = launch.launch_command_parser().parse_args(
        [*words, "--main_process_port=0", "program"]
    )
    arguments, *_ = launch._validate_launch_command(arguments)
    variables = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in variables.items() if os.environ.get(key) != value}


class Program:
    """A process that runs a program."""

    def __init__(
        self, words: tuple[str, ...], env: dict[str, str], out: Path, errors: Path
    ) -> None:
        """Starts it. It appends to the files ``out`` and ``errors``, which may be one."""
        request = {"words": words, "env": env, "cwd": str(Path.cwd())}
        request |= {"out": str(out), "errors": str(errors)}
        self.out, self.errors, self._status = out, errors, None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ.get(ADDRESS) or start_server())
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._receive()

    def poll(self) -> int | None:
        """As of `subprocess.Popen`."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            self._status = self._receive()
            self._connection.close()
        return self._status

    def wait(self, timeout: float = math.inf) -> int:
        """Likewise."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """To a process that may have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _receive(self) -> int:
        received = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(received) < NUMBER.size:
            raise RuntimeError("the process that starts tests' programs has ended")
        return NUMBER.unpack(received)[0]


@contextlib.contextmanager
def started(*program: str) -> Iterator[tuple[Program, Iterator[str]]]:
    """A single process, and the lines that it prints, as it prints them; killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "printed"
        os.mkfifo(pipe)
        process = Program(program, process_env(), pipe, pipe)
        try:
            with pipe.open(encoding="utf-8") as lines:
                yield process, lines
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def start_server() -> str:
    """Starts the process that forks the others, also for those that this one starts.

    It ends with this one. Returns its address.
    """
    folder = tempfile.mkdtemp()
    os.environ[ADDRESS] = str(Path(folder) / "server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()
        program, number = str(Path(__file__).with_name("warm_server.py")), listener.fileno()
        server = subprocess.Popen(
            # Its last argument is the room in which a process's list of words is shown.
            [sys.executable, program, str(number), 8000 * "."],
            stdin=subprocess.PIPE,
            pass_fds=[number],
            env=process_env(),
        )

    def end() -> None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return os.environ[ADDRESS]
