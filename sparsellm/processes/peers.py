"""The ranks of a run watch one another, so that a failed rank does not leave the others waiting.

A thread of each rank polls the launcher's key-value store once a second, also while the main thread
waits in a collective (gloo or NCCL). It ensures that

- an error is reported once, by the rank where it occurred, and the others end within seconds;
- a killed rank is noticed by its neighbour;
- a signal to one rank stops all ranks;
- ranks that keep the others waiting are named before a collective's timeout ends the run.
"""

import contextlib
import os
import secrets
import threading
import time
from collections import defaultdict
from datetime import timedelta
from textwrap import shorten
from typing import Any, Self

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from sparsellm.processes.distributed import WAITS, RankActivity
from sparsellm.processes.ranks import EndedByAnother, end_once, end_with, follow
from sparsellm.processes.signals import StopRequest
from sparsellm.runs.lock import HostProcess

POLL_SECONDS = 1.0
GRACE_SECONDS = 3.0  # in which a rank must end by itself after another one failed
SILENT_SECONDS = 60.0  # without a heartbeat from a rank on another host
EARLY_SECONDS = 30.0  # before a collective's timeout, whose error would name no rank
REPORT_SECONDS = 60.0  # that a step may last before the ranks it waits for are named
_ENDED = "ended without a word (killed, or out of memory?)"
_TIMEOUT_WORDS = ("timed out waiting", "application timeout")  # in gloo's errors


class Beat(HostProcess):
    """What a rank says of itself once a second."""

    rank: int
    count: int
    phase: str
    step: int
    seconds: float

    @property
    def name(self) -> str:
        """How messages name the rank."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended, which only its own host can tell."""
        return self.is_here and self.process is None


class Peers:
    """A context around the run: entered when the process group is up, left when the run has ended.

    Args:
        accelerator: the accelerator of the ranks.
        stop: receives a stop request if another rank got a signal.
        activity: activity of this rank.
        timeout_minutes: timeout of a collective; shortly before it, the run is ended and the ranks
            that it waited for are named.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        stop: StopRequest,
        activity: RankActivity,
        timeout_minutes: int,
    ) -> None:
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self._accelerator = accelerator
        self._stop, self._activity = stop, activity
        self._timeout_minutes = timeout_minutes
        self._closed = threading.Event()
        self._count = 0  # of heartbeats sent
        self._neighbour: tuple[int, float] | None = None  # its last count, and when it changed
        self._next_report = REPORT_SECONDS
        self._store: Any = None  # a single rank has no peers
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self._world_size > 1:
            self._store = _connect(accelerator)
            self._send_beat()

    def __enter__(self) -> Self:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        shared_error = self._tell_others(error) if isinstance(error, Exception) else None
        if error is None:
            self._accelerator.wait_for_everyone()  # else a slower rank would report this one dead
        self._closed.set()
        self._thread.join()
        if shared_error is not None and shared_error is not error:
            raise shared_error from None

    def _send_beat(self) -> None:
        self._count += 1
        beat = Beat.of_this_process(
            rank=self._rank,
            count=self._count,
            phase=self._activity.phase,
            step=self._activity.step,
            seconds=self._activity.seconds,
        )
        self._store.set(f"beat/{self._rank}", beat.model_dump_json())

    def _beat_of(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank; None before its first."""
        if not self._store.check([f"beat/{rank}"]):
            return None
        return Beat.model_validate_json(self._store.get(f"beat/{rank}"))

    def _beats(self) -> list[Beat]:
        """The last heartbeats of all ranks that have sent one."""
        return list(filter(None, map(self._beat_of, range(self._world_size))))

    def _tell_others(self, error: Exception) -> Exception:
        """Claims the right to report; returns the error to end with."""
        if isinstance(error, EndedByAnother):
            return error
        lost = _is_lost_contact(error)
        if lost:  # the rank that caused it may be about to report it
            self._wait_for_failure(5 * POLL_SECONDS)
        try:
            if self._store.add("claims", 1) > 1:
                return EndedByAnother()
            if lost:
                error = ConnectionError(self._describe_loss(error))
            self._store.set("failed", str(self._rank))
        except Exception as no_store:
            if lost:
                error = ConnectionError(_main_rank_is_gone(no_store))
        return error

    def _wait_for_failure(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with contextlib.suppress(Exception):
            while time.monotonic() < end and not self._store.check(["failed"]):
                time.sleep(0.1)

    def _describe_loss(self, error: Exception) -> str:
        beats = self._beats()
        gone = [beat for beat in beats if beat.is_dead]
        if not gone:
            time.sleep(4 * POLL_SECONDS)
            later = {beat.rank: beat.count for beat in self._beats()}
            gone = [beat for beat in beats if later.get(beat.rank) == beat.count]
        doing = f"step {self._activity.step + 1}, {self._activity.phase}"
        if gone:
            return (
                f"{doing}: {', '.join(beat.name for beat in gone)} {_ENDED}; the other ranks end "
                "too. The same command resumes"
            )
        if any(word in str(error).lower() for word in _TIMEOUT_WORDS):
            return self._describe_timeout()
        reason = shorten(str(error), 300)
        return f"{doing}: ranks lost contact ({reason}); the same command resumes"

    # --- the watching thread ---

    def _watch(self) -> None:
        lost = 0
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._poll()
                lost = 0
            except Exception as error:
                # A busy store may let one call time out; a closed connection never comes back.
                lost += 1
                if lost * POLL_SECONDS >= 5 and not self._closed.is_set():
                    end_once(_main_rank_is_gone(error))

    def _poll(self) -> None:
        if self._store.check(["failed"]):
            # Main threads of other ranks notice it only in collectives, or not at all.
            if not self._closed.wait(GRACE_SECONDS):
                follow()
            return
        self._pass_on_stop()
        self._send_beat()
        self._miss_neighbour()
        self._watch_progress()

    def _pass_on_stop(self) -> None:
        if self._stop.received is not None:
            if not self._store.check(["stop"]):
                self._store.set("stop", f"{self._stop.received} on rank {self._rank}")
        elif self._store.check(["stop"]):
            self._stop.ask(self._store.get("stop").decode())

    def _miss_neighbour(self) -> None:
        """Notices that the next rank in the ring was killed without reporting an error."""
        beat = self._beat_of((self._rank + 1) % self._world_size)
        if beat is None:
            return
        now = time.monotonic()
        if self._neighbour is None or self._neighbour[0] != beat.count:
            self._neighbour = (beat.count, now)
        silent = now - self._neighbour[1] > SILENT_SECONDS
        if beat.is_dead or silent:
            self._wait_for_failure(2 * POLL_SECONDS)  # it may have ended because a third one failed
            reason = f"gave no sign of life for {SILENT_SECONDS:.0f} s" if silent else _ENDED
            self._fail(f"{beat.name} {reason}; the other ranks end too. The same command resumes")

    def _watch_progress(self) -> None:
        """Names the ranks that a step waits for; ends it shortly before a collective times out."""
        activity = self._activity
        if activity.phase not in (*WAITS, "reading data"):
            self._next_report = REPORT_SECONDS
            return
        seconds = activity.seconds
        if activity.phase in WAITS and seconds > 60 * self._timeout_minutes - EARLY_SECONDS:
            self._fail(self._describe_timeout())
        if seconds < REPORT_SECONDS:
            self._next_report = REPORT_SECONDS
        elif self._rank == 0 and seconds > max(self._next_report, 3 * activity.longest):
            print(f"warning: {self._describe_progress(seconds)}", flush=True)
            self._next_report = 2 * seconds

    def _describe_timeout(self) -> str:
        return (
            f"{self._describe_progress(self._activity.seconds)}. Ranks wait for one another for "
            f"runtime.timeout_minutes {self._timeout_minutes} at most, and then end; the same "
            "command resumes"
        )

    def _describe_progress(self, seconds: float) -> str:
        doing = _progress(self._beats())
        return f"step {self._activity.step + 1} has not ended after {seconds:.0f} s. {doing}"

    def _fail(self, message: str) -> None:
        """Ends all ranks, unless one of them has reported another error already."""
        if self._store.check(["failed"]) or self._store.add("claims", 1) > 1:
            return
        self._store.set("failed", str(self._rank))
        end_with(message)


def _connect(accelerator: Accelerator) -> Any:
    """A separate connection to the store of the process group's rendezvous."""
    prefix = [secrets.token_hex(4)]
    broadcast_object_list(prefix)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    return dist.PrefixStore(f"sparsellm/{prefix[0]}", store)


def _main_rank_is_gone(error: Exception) -> str:
    """The message for an error of the launcher's store, which is on the main rank's node."""
    return f"the main rank is gone ({shorten(str(error), 200)}); the same command resumes"


def _progress(beats: list[Beat]) -> str:
    """What each rank is doing; those that keep the others waiting come first."""
    waiting = "waiting for others"
    groups: defaultdict[tuple[int, str], list[Beat]] = defaultdict(list)
    for beat in beats:
        doing = waiting if beat.phase in WAITS else beat.phase
        groups[beat.step, doing].append(beat)
    usual = max(groups, key=lambda key: len(groups[key]))
    parts = []
    for key, members in sorted(groups.items(), key=lambda i: (i[0][1] == waiting, len(i[1]))):
        who = ", ".join(b.name for b in members[:4]) + (", …" if len(members) > 4 else "")
        if key == usual and len(members) > 4:
            who = f"{len(members)} ranks"
        parts.append(f"{who}: {key[1]} for {max(b.seconds for b in members):.0f} s")
    return "; ".join(parts)


def _is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because of another rank, from the wording of gloo and NCCL."""
    words = ("connection closed by peer", "connection reset by peer", "gloo", "broken pipe", "nccl")
    message = str(error).lower()
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        type(error) is RuntimeError and any(word in message for word in (*words, *_TIMEOUT_WORDS))
    )
