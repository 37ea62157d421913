"""Which process trains a run: a file in its folder while it does, for `sparsellm stop`.

Imports no torch, so that the command answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

PRESENCE_FILE = "running.json"


@dataclass(frozen=True)
class Presence:
    """The process of rank 0."""

    host: str
    pid: int
    created: float  # seconds since the epoch; tells a process from a later one of the same number

    @property
    def process(self) -> psutil.Process | None:
        """The process, if it is on this host and still the same one."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.created) < 1 else None
        except psutil.NoSuchProcess:
            return None


def announce(run_path: Path) -> None:
    """Says that this process trains the run."""
    from sparsellm.runs.files import write_atomically

    own = Presence(socket.gethostname(), os.getpid(), psutil.Process().create_time())
    write_atomically(run_path / PRESENCE_FILE, json.dumps(asdict(own)) + "\n")


def withdraw(run_path: Path) -> None:
    """Says that it does no more. Another process's word is left as it is."""
    present = find(run_path)
    if present and (present.host, present.pid) == (socket.gethostname(), os.getpid()):
        (run_path / PRESENCE_FILE).unlink(missing_ok=True)


def find(run_path: Path) -> Presence | None:
    """Who says to train the run; after a kill it may be gone, see `Presence.process`."""
    try:
        return Presence(**json.loads((run_path / PRESENCE_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def ask_to_stop(run_path: Path) -> psutil.Process:
    """Sends SIGTERM to the process that trains a run: it saves after its step and ends.

    Raises:
        ValueError: there is none on this host; says where, or what to do.
    """
    if not run_path.is_dir():
        raise ValueError(f"{run_path} is no run folder; give such as runs/debug")
    present = find(run_path)
    if present is not None and present.host != socket.gethostname():
        raise ValueError(
            f"{run_path} is trained on host {present.host} (process {present.pid}), as far as its "
            f"{PRESENCE_FILE} says; run the same command there"
        )
    process = None if present is None else present.process
    if process is None:
        raise ValueError(
            f"no process trains {run_path}: it ended, was killed, or has not begun its first step "
            "(Ctrl-C in its terminal ends it then)"
        )
    process.send_signal(signal.SIGTERM)
    return process
