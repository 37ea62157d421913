"""One training per run folder: ``running.lock`` is there, and ``running.json`` says which.

The lock is a lease of filelock's, which NFS can do too: it is renewed every few seconds. On its own
host a dead holder is known at once; another host waits and watches whether the lock is renewed, so
that clocks need not agree. Imports no torch: `sparsellm stop` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil
from filelock import SoftFileLease, Timeout
from pydantic import BaseModel, ConfigDict, Field

from sparsellm.runs.files import write_atomically
from sparsellm.strict import read_model
from sparsellm.waiting import waiting

PRESENCE_FILE, LOCK_FILE = LOCK_FILES = "running.json", "running.lock"
RENEW_SECONDS = 10.0
STALE_SECONDS = 90.0  # without being renewed: its holder is gone


class HostProcess(BaseModel):
    """A process of this host or of another one."""

    model_config = ConfigDict(frozen=True)

    host: str
    pid: int = Field(ge=1, le=2**31 - 1)
    # seconds since the epoch; tells a process from a later one of the same number
    created: float = Field(ge=0, le=1e11)
    namespace: str = ""  # of process numbers: containers of one host may have their own

    @classmethod
    def own(cls, **further: Any) -> Self:
        """This process, with the further fields of a subclass."""
        created, host = psutil.Process().create_time(), socket.gethostname()
        return cls(host=host, pid=os.getpid(), created=created, namespace=_namespace(), **further)

    @property
    def is_here(self) -> bool:
        """Whether this host can see if the process lives."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

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


class Presence(HostProcess):
    """The process of rank 0; the file holds it as JSON."""

    # The run's folder by its path and its number on the disk: in a copy of it both differ, in one
    # that was renamed or is mounted elsewhere, only one of them. Early versions did not write them.
    folder: str = ""
    inode: int = 0

    @classmethod
    def within(cls, run_path: Path) -> Presence:
        """This process, which trains in an existing folder."""
        folder, inode = str(run_path.resolve()), run_path.stat().st_ino
        return cls.own(folder=folder, inode=inode)

    def is_of(self, run_path: Path) -> bool:
        """Whether it is about this folder, and not about one that was copied to here."""
        same_place = self.folder in ("", str(run_path.resolve()))
        return same_place or self.inode == run_path.stat().st_ino

    @property
    def text(self) -> str:
        """Description for messages."""
        since = datetime.fromtimestamp(self.created).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.pid} on host {self.host}, begun {since}"


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that its parent has not waited for has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _namespace() -> str:
    """Names the namespace of this process's number; "" where the system does not tell."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def read_presence(run_path: Path) -> Presence | None:
    """The process that claims to train the run; it may be gone, see `Presence.process`.

    Raises:
        ValueError: the file is damaged; names it and the key.
    """
    remedy = f"if nothing trains {run_path}, delete it"
    try:
        return Presence(**read_model(run_path / PRESENCE_FILE, Presence, remedy))
    except FileNotFoundError:
        return None


def find(run_path: Path) -> Presence | None:
    """As `read_presence`, but None for a damaged file."""
    with contextlib.suppress(ValueError):
        return read_presence(run_path)
    return None


def ask_to_stop(run_path: Path) -> psutil.Process:
    """Sends SIGTERM to the process that trains a run: it saves after its step and ends.

    Raises:
        ValueError: there is none on this host; says where, or what to do.
    """
    if not run_path.is_dir():
        raise ValueError(f"{run_path} is not a run folder; give one such as runs/debug")
    if present := read_presence(run_path):
        if not present.is_of(run_path):
            raise ValueError(
                f"no process trains {run_path}: its {PRESENCE_FILE} was copied from "
                f"{present.folder}"
            )
        if present.host != socket.gethostname():
            raise ValueError(
                f"{run_path} is trained on host {present.host} (process {present.pid}), as far as "
                f"its {PRESENCE_FILE} says; run the same command there"
            )
        if process := present.process:
            process.send_signal(signal.SIGTERM)
            return process
    raise ValueError(
        f"no process trains {run_path}: it ended, was killed, or has not begun its first step "
        "(Ctrl-C in its terminal ends it then)"
    )


class RunLock:
    """Held from `acquire` to `release`; the next process takes over the lock of a dead one.

    Args:
        run_path: the run's folder.
        lost: called when the lock is this training's no longer: another one has taken it, because
            it was not renewed for `STALE_SECONDS` (a stopped process, a file system that was away),
            or somebody deleted it.
    """

    def __init__(self, run_path: Path, lost: Callable[[], None]) -> None:
        self._run_path = run_path
        self._lease = SoftFileLease(
            run_path / LOCK_FILE,
            lease_duration=STALE_SECONDS,
            heartbeat_interval=RENEW_SECONDS,
            on_compromise=lambda _: lost(),
            thread_local=False,
        )

    def acquire(self, say: Callable[[str], None]) -> None:
        """Takes the lock, also from a dead holder.

        Raises:
            ValueError: another training holds it; says which, and what to do.
            OSError: the folder cannot be written.
        """
        self._run_path.mkdir(parents=True, exist_ok=True)
        holder, file = find(self._run_path), self._run_path / LOCK_FILE
        renewed = _when_renewed(file)
        lives_here = holder is not None and holder.process and holder.is_of(self._run_path)
        who = holder.text if holder else f"whoever wrote {file}"
        try:
            with waiting(f"waiting up to {STALE_SECONDS:.0f} s for a sign of life of {who}", say):
                self._lease.acquire(
                    0 if lives_here else STALE_SECONDS + RENEW_SECONDS,
                    cancel_check=lambda: _when_renewed(file) not in (None, renewed),
                )
        except Timeout as error:
            holder = find(self._run_path)
            raise ValueError(
                f"{self._run_path} is being trained: {holder.text if holder else 'see'} "
                f"({file}). Wait for it, end it (`sparsellm stop {self._run_path}`), or train by "
                "another name: --set name=NEW. If nothing trains there, delete that file"
            ) from error
        try:
            own = Presence.within(self._run_path).model_dump_json()
            write_atomically(self._run_path / PRESENCE_FILE, own + "\n")
        except OSError:  # a full disk
            self._lease.release()
            raise

    def release(self) -> None:
        """Removes the lock; another training's lock is left unchanged."""
        owner = self._lease.owner
        if owner is not None and owner.token == self._lease.token:
            (self._run_path / PRESENCE_FILE).unlink(missing_ok=True)
        self._lease.release()
        with contextlib.suppress(OSError):
            self._run_path.rmdir()  # where nothing was written

    def moved(self, aside: Path, say: Callable[[str], None]) -> None:
        """Takes the lock of the new folder after the old one was renamed with its lock."""
        self._lease.release()
        for name in LOCK_FILES:
            (aside / name).unlink(missing_ok=True)
        self.acquire(say)


def _when_renewed(path: Path) -> int | None:
    """Nanoseconds, by the clock of the file system; opened, since NFS then asks the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
