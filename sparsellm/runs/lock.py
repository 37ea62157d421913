"""One training per run folder: ``running.json`` is there while one runs, and says which.

The file is created exclusively, which NFS can do too, and its time is renewed every few seconds. On
its own host a dead holder is known at once; another host waits and watches whether the file is
renewed, so that clocks need not agree. Imports no torch: `sparsellm stop` answers at once.
"""

import contextlib
import hashlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field

from sparsellm.recipe.strict import read_model

PRESENCE_FILE = "running.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 90.0  # without a renewal: then its holder is taken for dead
_WATCH_SECONDS = 1.0


class HostProcess(BaseModel):
    """A process of this host or of another one."""

    model_config = ConfigDict(frozen=True)

    host: str
    pid: int = Field(ge=1, le=2**31 - 1)
    # Both in seconds since the epoch, by the clock at that time. If the clock is set, both move;
    # their difference tells a process from a later one of the same number.
    created: float = Field(ge=0, le=1e11)
    booted: float = Field(ge=0, le=1e11)
    namespace: str = ""  # of process numbers: containers of one host may have their own

    @classmethod
    def of_this_process(cls, **further: Any) -> Self:
        """This process, with the further fields of a subclass."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            booted=psutil.boot_time(),
            namespace=_namespace(),
            **further,
        )

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
            after_boot = process.create_time() - psutil.boot_time()
            same = abs(after_boot - (self.created - self.booted)) < 0.1
        except psutil.NoSuchProcess:
            return None
        return process if same and lives(process) else None


class Presence(HostProcess):
    """The process of rank 0; the file holds it as JSON."""

    id: str  # of this training
    # The run's folder by its path and its number on the disk: in a copy of it both differ, in one
    # that was renamed or is mounted elsewhere, only one of them.
    folder: str
    inode: int

    @classmethod
    def within(cls, run_path: Path, training: str) -> Self:
        """This process, which trains in an existing folder; ``training`` is the id."""
        return cls.of_this_process(
            id=training, folder=str(run_path.resolve()), inode=run_path.stat().st_ino
        )

    def is_of(self, run_path: Path) -> bool:
        """Whether it is about this folder, and not about one that was copied to here."""
        return self.folder == str(run_path.resolve()) or self.inode == run_path.stat().st_ino

    @property
    def text(self) -> str:
        """Description for messages."""
        since = datetime.fromtimestamp(self.created).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.pid} on host {self.host}, begun {since}"


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended. A zombie, for which its parent did not wait, has ended."""
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
        ValueError: the file is damaged; the message names it and the key.
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
        ValueError: there is none on this host; the message says where it is, or what to do.
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


def refuse_if_trained(run_path: Path) -> None:
    """Raises ValueError if a process of this host trains the run, before anything is loaded.

    Of another host that is known only after a while, see `RunLock.acquire`.
    """
    holder = find(run_path)
    if holder is not None and holder.process is not None and holder.is_of(run_path):
        raise _trained(run_path, holder.text)


def _trained(run_path: Path, holder: str) -> ValueError:
    return ValueError(
        f"{run_path} is being trained: {holder} ({run_path / PRESENCE_FILE}). Wait for it, end it "
        f"(`sparsellm stop {run_path}`), or train under another name: --set name=NEW"
    )


class RunLock:
    """Held from `acquire` to `release`; the next process takes over the lock of a dead one.

    Args:
        run_path: the run's folder.
        say: prints a line.
        lost: called when another training has taken the lock from this one, which had not renewed
            it for `STALE_SECONDS` (a stopped process, a file system that was away).
    """

    def __init__(
        self, run_path: Path, say: Callable[[str], None], lost: Callable[[Presence | None], None]
    ) -> None:
        self._run_path, self._say, self._lost = run_path, say, lost
        self._file = run_path / PRESENCE_FILE
        self._id = secrets.token_hex(8)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, also from a dead holder.

        Raises:
            ValueError: another training holds it; the message says which, and what to do.
            OSError: the folder cannot be written.
        """
        self._run_path.mkdir(parents=True, exist_ok=True)
        while not self._create():
            lock_state = _look(self._file)
            if lock_state is None:
                continue  # it was released just now
            holder = find(self._run_path)
            if not self._is_dead(holder, lock_state):
                raise _trained(self._run_path, holder.text if holder else "see")
            self._take_away(lock_state)
        for remains in self._run_path.glob(".tmp-taking-*"):  # of killed processes
            remains.unlink(missing_ok=True)
        self._ended.clear()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Removes the lock; another training's lock is left unchanged."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        present = find(self._run_path)
        if present is not None and present.id == self._id:
            self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._run_path.rmdir()  # where nothing was written

    def moved(self, aside: Path) -> None:
        """Takes the lock of the new folder after the old one was renamed with its lock."""
        self.release()
        (aside / PRESENCE_FILE).unlink(missing_ok=True)
        self.acquire()

    def _create(self) -> bool:
        presence = Presence.within(self._run_path, self._id)
        try:
            file = self._file.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:  # whoever finds it empty waits for the rest, see `_is_dead`
                file.write(presence.model_dump_json() + "\n")
        except OSError:  # a full disk
            self._file.unlink()
            raise
        return True

    def _is_dead(self, holder: Presence | None, lock_state: tuple[bytes, int]) -> bool:
        if holder is not None and holder.is_here:
            return holder.process is None or not holder.is_of(self._run_path)
        who = holder.text if holder else f"whoever wrote {self._file}"
        # An empty file is filled at once, unless its process was killed or the power failed.
        seconds = STALE_SECONDS if lock_state[0] else RENEW_SECONDS
        self._say(f"waiting for a sign of life of {who}, for {seconds:.0f} s at most")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)
            if _look(self._file) != lock_state:
                return False
        return True

    def _take_away(self, lock_state: tuple[bytes, int]) -> None:
        """Removes the lock that was read, but not another one that replaced it.

        Of several processes that found it dead, the one that creates the file ``taking`` does so.
        """
        taking = self._run_path / f".tmp-taking-{hashlib.sha256(lock_state[0]).hexdigest()[:16]}"
        try:
            taking.touch(exist_ok=False)
        except FileExistsError:
            end = time.monotonic() + STALE_SECONDS
            while taking.exists():
                if time.monotonic() > end:  # the process that made it is dead, too
                    taking.unlink(missing_ok=True)
                time.sleep(0.02)
            return
        try:
            if _look(self._file) == lock_state:
                self._file.unlink(missing_ok=True)
        finally:
            taking.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the file system is away: its holder still lives
                if not self._is_own():
                    self._lost(find(self._run_path))
                    return

    def _is_own(self) -> bool:
        """Whether the lock is still this process's; if so it is renewed."""
        holder = find(self._run_path)
        if holder is None:
            return self._create()  # somebody deleted it; a damaged one stays as it is
        if holder.id != self._id:
            return False
        os.utime(self._file)  # if another has just replaced it, that one has a holder that lives
        return True


def _look(path: Path) -> tuple[bytes, int] | None:
    """The lock's content and its last renewal; opened, since NFS then asks the server."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
