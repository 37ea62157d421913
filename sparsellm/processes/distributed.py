"""What all ranks do at the same place: agree, fail together; one process does it alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sparsellm.processes.ranks import EndedByAnother
from sparsellm.sparsity.over_ranks import any_rank, largest

WAITS = ("computing", "summing over ranks")  # phases that wait for other ranks


@dataclass
class RankActivity:
    """What the main thread of a rank is doing, for the watching thread."""

    phase: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    longest: float = 0.0  # seconds of the longest phase so far, without the first step

    def begin(self, phase: str, step: int) -> None:
        """The main thread begins ``phase`` of the step that follows ``step`` finished ones."""
        now = time.monotonic()
        if self.phase in WAITS and self.step > 1:
            self.longest = max(self.longest, now - self.since)
        self.phase, self.step, self.since = phase, step, now

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.since


class FailedTogether(RuntimeError):
    """Every rank raises it at the same place, so that they can go on, or save, together.

    ``error`` is this rank's error, or None; ``speaks`` says whether this rank reports its error.
    """

    def __init__(self, error: Exception | None, speaks: bool = True) -> None:
        super().__init__(str(error or "another rank failed"))
        self.error = error
        self.speaks = speaks and error is not None


def cause_of(error: Exception) -> Exception:
    """The error that ends this process: its own, or `EndedByAnother`."""
    if not isinstance(error, FailedTogether):
        return error
    return EndedByAnother() if error.error is None else error.error


class Interrupted(Exception):
    """Every rank raises it at the same place: one of them was asked to stop."""


def agree(error: Exception | None, interrupted: bool, device: torch.device) -> None:
    """Returns if no rank has an error or was interrupted; every rank must call it.

    Raises:
        FailedTogether: some rank has an error. The lowest such rank speaks.
        Interrupted: none has, and some rank was interrupted.
    """
    ranks_above = dist.get_world_size() - dist.get_rank() if dist.is_initialized() else 1
    error_code = 1 + ranks_above  # the larger, the lower the rank
    worst = largest(error_code if error is not None else int(interrupted), device)
    if worst > 1:
        raise FailedTogether(error, speaks=worst == error_code)
    if worst == 1:
        raise Interrupted


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """Ends all ranks if the body fails on one; a rank whose body failed raises its own error.

    Raises:
        ValueError, OSError: the body failed on this rank.
        EndedByAnother: the body failed on another rank alone.
    """
    error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as met:
        error = met
    if any_rank(error is not None, device):
        raise error or EndedByAnother() from None
