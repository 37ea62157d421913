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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import Field

from sparsellm.strict import StrictModel, parse_json, validate

PRESENCE_FILE = "running.json"


@dataclass(frozen=True)
class Presence:
    """The process of rank 0; the file holds it as JSON."""

    host: str
    pid: int
    created: float  # seconds since the epoch; tells a process from a later one of the same number
    namespace: str = ""  # of process numbers: containers of one host may have their own
    id: str = ""  # of this training

    @classmethod
    def own(cls) -> Presence:
        """This process."""
        created = psutil.Process().create_time()
        return cls(socket.gethostname(), os.getpid(), created, _namespace(), secrets.token_hex(8))

    @property
    def is_here(self) -> bool:
        """Whether this host can see if the process lives."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    @property
    def text(self) -> str:
        """Description for messages."""
        since = datetime.fromtimestamp(self.created).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.pid} on host {self.host}, begun {since}"

    @property
    def process(self) -> psutil.Process | None:
        """The process, if it is on this host and still the same one."""
        if not self.is_here:
            return None
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.created) < 1 else None
        except psutil.NoSuchProcess:
            return None


class _PresenceFile(StrictModel):
    host: str
    pid: int = Field(ge=1, le=2**31 - 1)
    created: float = Field(ge=0, le=1e11)  # a value from which a date can be made
    namespace: str = ""
    id: str = ""


def _namespace() -> str:
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
    path = run_path / PRESENCE_FILE
    remedy = f"if nothing trains {run_path}, delete it"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}); {remedy}") from None
    content = parse_json(text, str(path), remedy)
    try:
        validate(_PresenceFile, content, str(path), path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    return Presence(**content)


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
