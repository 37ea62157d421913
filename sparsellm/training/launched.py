"""Training runs in processes of their own: started by `accelerate launch`, watched, killed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil

from sparsellm.paths import bundled
from sparsellm.runs.records import METRICS_FILE, read_metrics

Record = dict[str, Any]  # a line of metrics.jsonl, of kind `train`
T = TypeVar("T")

POLL_SECONDS = 0.02
LONGEST_REASON = 300  # characters
# What names a failure: our own commands' message, or the last line of a traceback.
_ERROR = re.compile(r"(\[rank\d+\]: *)?(error\b|[\w.]+Error\b)")


def launch_config(name: str) -> Path:
    """A file of launch/ by its name.

    Raises:
        ValueError: there is none; lists those that there are.
    """
    path = bundled("launch") / f"{name}.yaml"
    if not path.is_file():
        names = sorted(other.stem for other in path.parent.glob("*.yaml"))
        raise ValueError(f"--config {name}: no such file in launch/; there are {', '.join(names)}")
    return path


def train_command(
    config: str, gpus: int, recipe: str, overrides: Sequence[str], init_from: Path | None
) -> list[str]:
    """What a user would type to train ``recipe`` on so many GPUs of one node, on any free port.

    A configuration for several nodes (HSDP) takes the halves of four GPUs or more for nodes, and
    fewer for one.
    """
    path = launch_config(config)
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    words += [f"--config_file={path}", f"--num_processes={gpus}"]
    if "\nparallelism_config:" in path.read_text(encoding="utf-8"):
        replicas = 2 if gpus >= 4 and gpus % 2 == 0 else 1
        words += ["--num_machines=1", "--rdzv_backend=static"]
        words.append(f"--parallelism_config_dp_replicate_size={replicas}")
        words.append(f"--parallelism_config_dp_shard_size={gpus // replicas}")
    words += ["--main_process_port=0", "-m", "sparsellm", "train", "--recipe", recipe]
    words += [word for override in overrides for word in ("--set", override)]
    return words if init_from is None else [*words, "--init-from", str(init_from)]


def on_gpus(gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a process that sees these GPUs alone; none leaves it what it has."""
    return os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def visible_gpus(count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs of this process, of which there are ``count``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def watch(
    command: Sequence[str], run_path: Path, gpus: Sequence[str] = ()
) -> Generator[list[Record], None, None]:
    """Starts a run, and yields its records whenever there are new ones, and once it has ended.

    Closing the iterator earlier kills the run with SIGKILL. What it prints goes to
    ``<run_path>.log``.

    Args:
        command: see `train_command`.
        run_path: the folder of the run that it trains.
        gpus: those that it sees; none leaves it all.

    Raises:
        ValueError: it failed; with its reason.
    """
    seen = _version(run_path)  # of an earlier part of the run: nothing new
    with _launched(command, run_path.with_name(f"{run_path.name}.log"), gpus) as process:
        while process.poll() is None:
            if (version := _version(run_path)) != seen:
                seen = version
                yield train_records(run_path)
            time.sleep(POLL_SECONDS)
    yield train_records(run_path)


@contextlib.contextmanager
def _launched(
    command: Sequence[str], output: Path, gpus: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=on_gpus(gpus)
        )
    try:
        yield process
    finally:
        kill(process)
    if process.returncode:
        reason = failure_reason(output.read_text(encoding="utf-8", errors="replace"))
        raise ValueError(f"the launch failed: {reason} (all it said: {output})")


@contextlib.contextmanager
def at_once(places: int) -> Iterator[Callable[[Callable[[int], T]], Future[T]]]:
    """Calls submitted functions in threads, each with the number of a place that no other has.

    Left by an exception, it kills what they have started.
    """
    free: SimpleQueue[int] = SimpleQueue()
    for place in range(places):
        free.put(place)

    def call(function: Callable[[int], T]) -> T:
        place = free.get()
        try:
            return function(place)
        finally:
            free.put(place)

    pool = ThreadPoolExecutor(places)
    try:
        yield lambda function: pool.submit(call, function)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _kill_all(psutil.Process().children(recursive=True))
        raise
    finally:
        pool.shutdown()


def train_records(run_path: Path) -> list[Record]:
    """The run's records of training steps, in order."""
    return [record for record in read_metrics(run_path) if record["kind"] == "train"]


def _version(run_path: Path) -> tuple[int, int] | None:
    """Tells one state of the run's metrics from the next; None before there are any."""
    try:
        status = (run_path / METRICS_FILE).stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all that the launcher started, and waits for it to be gone from the GPUs.

    A signal to its process group would not do: torchrun gives every rank a session of its own.
    """
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _kill_all(family)
    process.wait()
    while any(map(lives, family)):
        time.sleep(POLL_SECONDS)


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that its parent has not waited for has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def failure_reason(output: str) -> str:
    """The first line that names an error, else the last one: the rest is the launcher's."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named[:1] or lines[-1:] or ["it said nothing"])[0][:LONGEST_REASON]
