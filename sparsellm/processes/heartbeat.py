"""What ranks tell one another once a second, through the key-value store of their launcher."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from sparsellm.processes.distributed import WAITS, RankActivity
from sparsellm.runs.presence import pid_namespace


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself once a second."""

    rank: int
    count: int
    host: str
    pid: int
    namespace: str  # namespace of process numbers
    phase: str
    step: int
    seconds: float

    @property
    def name(self) -> str:
        """How messages name the rank."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def is_dead(self, here: Beat) -> bool:
        """Whether its process has ended, which only its own host can tell."""
        if (self.host, self.namespace) != (here.host, here.namespace):
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


class Heartbeats:
    """The heartbeats of all ranks, of which this one sends its own.

    Args:
        store: the key-value store of the launch.
        rank: this rank.
        world_size: number of ranks.
        activity: of this rank's main thread.
    """

    def __init__(self, store: Any, rank: int, world_size: int, activity: RankActivity) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._activity = activity
        self._count = 0

    def send(self) -> None:
        """Replaces this rank's heartbeat by its present one."""
        self._count += 1
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.own())))

    def own(self) -> Beat:
        """This rank's heartbeat."""
        return Beat(
            rank=self._rank,
            count=self._count,
            host=socket.gethostname(),
            pid=os.getpid(),
            namespace=pid_namespace(),
            phase=self._activity.phase,
            step=self._activity.step,
            seconds=self._activity.seconds,
        )

    def of(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank; None before its first."""
        if not self._store.check([f"beat/{rank}"]):
            return None
        return Beat(**json.loads(self._store.get(f"beat/{rank}")))

    def all(self) -> list[Beat]:
        """The last heartbeats of all ranks that have sent one."""
        found = (self.of(rank) for rank in range(self._world_size))
        return [beat for beat in found if beat is not None]


def describe_progress(beats: list[Beat]) -> str:
    """What each rank is doing; those that keep the others waiting come first."""
    waiting = "waiting for others"
    groups: defaultdict[tuple[int, str], list[Beat]] = defaultdict(list)
    for beat in beats:
        doing = waiting if beat.phase in WAITS else beat.phase
        groups[beat.step, doing].append(beat)
    usual = Counter({key: len(own) for key, own in groups.items()}).most_common(1)[0][0]
    parts = []
    for key, own in sorted(groups.items(), key=lambda i: (i[0][1] == waiting, len(i[1]))):
        who = ", ".join(b.name for b in own[:4]) + (", …" if len(own) > 4 else "")
        if key == usual and len(own) > 4:
            who = f"{len(own)} ranks"
        parts.append(f"{who}: {key[1]} for {max(b.seconds for b in own):.0f} s")
    return "; ".join(parts)
