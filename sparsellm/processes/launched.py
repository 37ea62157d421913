"""Training runs in processes of their own: started by `accelerate launch`, watched, killed."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import psutil

from sparsellm.paths import bundled
from sparsellm.runs.lock import lives
from sparsellm.runs.telemetry.metrics import Line
from sparsellm.runs.telemetry.records import METRICS_FILE, read_metrics

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

    A configuration for several nodes (HSDP) treats each half of four or more GPUs as a node, and
    fewer GPUs as one node.
    """
    path = launch_config(config)
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    words += [f"--config_file={path}", f"--num_processes={gpus}"]
    if "\nparallelism_config:" in path.read_text(encoding="utf-8"):
        replicas = 2 if gpus >= 4 and gpus % 2 == 0 else 1
        words += one_node(replicas, gpus // replicas)
    words += ["--main_process_port=0", "-m", "sparsellm", "train", "--recipe", recipe]
    words += [word for override in overrides for word in ("--set", override)]
    return words if init_from is None else [*words, "--init-from", str(init_from)]


def one_node(replicas: int, shards: int) -> list[str]:
    """The options with which `accelerate launch` has so many replicas and shards on one node."""
    return [
        "--num_machines=1",
        f"--parallelism_config_dp_replicate_size={replicas}",
        f"--parallelism_config_dp_shard_size={shards}",
    ]


def watch(command: Sequence[str], run_path: Path) -> Generator[list[Line], None, None]:
    """Starts a run, and yields its records whenever there are new ones, and once it has ended.

    Closing the iterator earlier kills the run with SIGKILL. What it prints goes to
    ``<run_path>.log``.

    Args:
        command: see `train_command`.
        run_path: the folder of the run that it trains.

    Raises:
        ValueError: it failed; with its reason.
    """
    last_version = _version(run_path)  # of an earlier part of the run: nothing new
    output = run_path.with_name(f"{run_path.name}.log")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            if (version := _version(run_path)) != last_version:
                last_version = version
                yield read_metrics(run_path, "train")
            time.sleep(POLL_SECONDS)
    finally:
        kill(process)
    if process.returncode:
        reason = failure_reason(output.read_text(encoding="utf-8", errors="replace"))
        raise ValueError(f"the launch failed: {reason} (all it said: {output})")
    yield read_metrics(run_path, "train")


def _version(run_path: Path) -> tuple[int, int] | None:
    """Tells one state of the run's metrics from the next; None before there are any."""
    try:
        status = (run_path / METRICS_FILE).stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all that the launcher started, and waits for it to be gone from the GPUs.

    A signal to its process group would not suffice: torchrun gives every rank its own session.
    """
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    while any(map(lives, family)):
        time.sleep(POLL_SECONDS)


def failure_reason(output: str) -> str:
    """The first line that names an error, else the last one: the rest is the launcher's."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named[:1] or lines[-1:] or ["it said nothing"])[0][:LONGEST_REASON]
