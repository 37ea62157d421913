"""What a step consists of when it begins; step_start.py makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsellm.data import TokenLoader
from sparsellm.data.loader import Bookmark
from sparsellm.training.objective import LossSums
from sparsellm.training.step_sums import StepSums


class MicroBatchReader:
    """Reads the micro-batches of a step, of which 1 is the first.

    A rank that cannot read data continues with zeros and reports the error with the step's sums:
    otherwise the other ranks would wait for it in their collectives until a timeout.
    """

    def __init__(self, loader: TokenLoader, shape: tuple[int, int], step: int) -> None:
        self.step = step
        self.error: Exception | None = None
        self._loader, self._shape = loader, shape

    def next(self) -> torch.Tensor:
        """int64 (micro-batch, context_length + 1)."""
        if self.error is None:
            try:
                return next(self._loader)
            except (ValueError, OSError) as error:
                self.error = error
        return torch.zeros(self._shape, dtype=torch.int64)


@dataclass
class StepStart:
    """A step of which the first forward pass is queued."""

    rounds: Iterator[None]  # `accumulation`, at its first micro-batch
    reader: MicroBatchReader
    sums: StepSums
    first: LossSums  # of the first micro-batch, with its graph


@dataclass
class Begun:
    """A step that has begun within the one before it, or what it raises when its turn comes: the
    step before it stays whole."""

    position: Bookmark  # of the data before it
    start: StepStart | Exception
