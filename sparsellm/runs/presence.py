"""Which process trains a run: a file in its folder while it does.

`runs.lock` writes it, so that no second training begins; `sparsellm stop` reads it. Imports no
torch, so that the command answers at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from sparsellm.runs.files import read_model

PRESENCE_FILE = "running.json"


class Presence(BaseModel):
    """The process of rank 0; the file holds it as JSON."""

    model_config = ConfigDict(frozen=True)

    host: str
    pid: int = Field(ge=1, le=2**31 - 1)
    # seconds since the epoch; tells a process from a later one of the same number
    created: float = Field(ge=0, le=1e11)
    namespace: str = ""  # of process numbers: containers of one host may have their own
    id: str = ""  # of this training
    # The run's folder by its path and its number on the disk: in a copy of it both differ, in one
    # that was renamed or is mounted elsewhere, only one of them. Early versions did not write them.
    folder: str = ""
    inode: int = 0

    @classmethod
    def own(cls, run_path: Path) -> Presence:
        """This process, which trains in an existing folder."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            namespace=pid_namespace(),
            id=secrets.token_hex(8),
            folder=str(run_path.resolve()),
            inode=run_path.stat().st_ino,
        )

    def is_of(self, run_path: Path) -> bool:
        """Whether it is about this folder, and not about one that was copied to here."""
        same_place = self.folder in ("", str(run_path.resolve()))
        return same_place or self.inode == run_path.stat().st_ino

    @property
    def is_here(self) -> bool:
        """Whether this host can see if the process lives."""
        return (self.host, self.namespace) == (socket.gethostname(), pid_namespace())

    @property
    def text(self) -> str:
        """Description for messages."""
        since = datetime.fromtimestamp(self.created).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.pid} on host {self.host}, begun {since}"

    @property
    def process(self) -> psutil.Process | None:
        """The process, if it is on this host, lives, and is still the same one."""
        if not self.is_here:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1
        except psutil.NoSuchProcess:
            return None
        return process if same and lives(process) else None


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that its parent has not waited for has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_namespace() -> str:
    """Names the namespace of this process's number; "" where the system does not tell."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def find(run_path: Path) -> Presence | None:
    """The process that claims to train the run; it may be gone, see `Presence.process`."""
    try:
        return read_presence(run_path)
    except (FileNotFoundError, ValueError):
        return None


def read_presence(run_path: Path) -> Presence:
    """As `find`, where the file must be there and whole.

    Raises:
        FileNotFoundError: there is none: nobody trains the run.
        ValueError: it is damaged; names it and the key.
    """
    remedy = f"if nothing trains {run_path}, delete it"
    return Presence(**read_model(run_path / PRESENCE_FILE, Presence, remedy))


def ask_to_stop(run_path: Path) -> psutil.Process:
    """Sends SIGTERM to the process that trains a run: it saves after its step and ends.

    Raises:
        ValueError: there is none on this host; says where, or what to do.
    """
    if not run_path.is_dir():
        raise ValueError(f"{run_path} is not a run folder; give such as runs/debug")
    try:
        present = read_presence(run_path)
    except FileNotFoundError:
        present = None
    if present is not None and not present.is_of(run_path):
        raise ValueError(
            f"no process trains {run_path}: its {PRESENCE_FILE} was copied from {present.folder}"
        )
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
