"""One training per run folder: ``running.json`` is there while one runs, and says which.

The file appears by a hard link, which is atomic on NFS too, and its time is renewed every few
seconds. On its own host a dead holder is known at once; another host waits and watches whether the
file is renewed, so that clocks need not agree. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sparsellm.runs.presence import PRESENCE_FILE, Presence, find
from sparsellm.strict import parse_json

RENEW_SECONDS = 10.0
STALE_SECONDS = 90.0  # without being renewed: its holder is gone
_WATCH_SECONDS = 1.0


class RunLock:
    """Held from `acquire` to `release`; the next process takes over the lock of a dead one.

    Args:
        run_path: the run's folder.
        lost: called where another training has taken the lock from this one, which had not renewed
            it for `STALE_SECONDS` (a stopped process, a file system that was away).
    """

    def __init__(self, run_path: Path, lost: Callable[[Presence | None], None]) -> None:
        self._run_path, self._lost = run_path, lost
        self._own: Presence | None = None
        self._file = run_path / PRESENCE_FILE
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, say: Callable[[str], None]) -> None:
        """Takes the lock, also from a dead holder.

        Raises:
            ValueError: another training holds it; says which, and what to do.
            OSError: the folder cannot be written.
        """
        self._run_path.mkdir(parents=True, exist_ok=True)
        self._own = Presence.own(self._run_path)
        while not self._create(self._own):
            seen = _look(self._file)
            if seen is None:
                continue  # it was released just now
            holder = find(self._run_path)
            if not self._is_dead(holder, seen, say):
                raise ValueError(
                    f"{self._run_path} is being trained: {holder.text if holder else 'see'} "
                    f"({self._file}). Wait for it, end it (`sparsellm stop {self._run_path}`), or "
                    "train by another name: --set name=NEW"
                )
            self._take_away(seen)
        for remains in (f".tmp-{PRESENCE_FILE}-*", ".tmp-taking-*"):  # of killed processes
            for path in self._run_path.glob(remains):
                path.unlink(missing_ok=True)
        self._ended.clear()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Removes the lock; another training's lock is left unchanged."""
        if self._thread is None or self._own is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        present = find(self._run_path)
        if present is not None and present.id == self._own.id:
            self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._run_path.rmdir()  # where nothing was written

    def moved(self, aside: Path, say: Callable[[str], None]) -> None:
        """Takes the lock of the new folder after the old one was renamed with its lock."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        (aside / PRESENCE_FILE).unlink(missing_ok=True)
        self.acquire(say)

    def _create(self, own: Presence) -> bool:
        text = own.model_dump_json() + "\n"
        draft = self._run_path / f".tmp-{PRESENCE_FILE}-{own.id}"
        draft.write_text(text, encoding="utf-8")
        try:
            self._file.hardlink_to(draft)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                with self._file.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _is_dead(
        self, holder: Presence | None, seen: tuple[bytes, int], say: Callable[[str], None]
    ) -> bool:
        if holder is not None and holder.is_here:
            return holder.process is None or not holder.is_of(self._run_path)
        who = holder.text if holder else f"whoever wrote {self._file}"
        say(f"waiting for a sign of life of {who}, for {STALE_SECONDS:.0f} s at most")
        end = time.monotonic() + STALE_SECONDS
        while time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)
            if _look(self._file) != seen:
                return False
        return True

    def _take_away(self, seen: tuple[bytes, int]) -> None:
        """Removes the lock that was read, but not another one that replaced it.

        Of several processes that found it dead, the one that creates the file ``taking`` does so.
        """
        taking = self._run_path / f".tmp-taking-{hashlib.sha256(seen[0]).hexdigest()[:16]}"
        try:
            taking.touch(exist_ok=False)
        except FileExistsError:
            self._wait_for(taking)
            return
        try:
            if _look(self._file) == seen:
                self._file.unlink(missing_ok=True)
        finally:
            taking.unlink(missing_ok=True)

    @staticmethod
    def _wait_for(taking: Path) -> None:
        end = time.monotonic() + STALE_SECONDS
        while taking.exists():
            if time.monotonic() > end:  # the process that made it is dead, too
                taking.unlink(missing_ok=True)
            time.sleep(0.02)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the file system is away: its holder still lives
                if self._own is not None and not self._is_own(self._own):
                    self._lost(find(self._run_path))
                    return

    def _is_own(self, own: Presence) -> bool:
        """Whether the lock is still this process's; if so it is renewed."""
        try:
            with self._file.open("r+b") as file:
                text = file.read().decode("utf-8", errors="replace")
                is_own = parse_json(text, str(self._file), "").get("id") == own.id
                if is_own:
                    os.utime(file.fileno())  # of the file that was read, whatever bears its name
                return is_own
        except FileNotFoundError:
            return self._create(own)  # somebody deleted it
        except ValueError:
            return False


def _look(path: Path) -> tuple[bytes, int] | None:
    """What the lock says, and when it was renewed; opened, since NFS then asks the server."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
