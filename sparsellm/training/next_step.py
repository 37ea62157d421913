"""The next step, whose first forward pass is queued before the numbers of the last one are read.

The host must read a step's numbers before it can log them and adapt λ. That read waits for the GPU,
and the host then needs 4 to 5 ms until the next forward pass runs. So the loop has `train_step`
launch the next step's first forward pass before it waits: the GPU is idle for 2.8% of a step of the
recipe `small` instead of 6.7% (one H200, micro-batch 32, steps of 86 and 89 ms, commit d8526f9).

The update of weights and statistics is queued by then, and λ enters only after the forward pass.
What the numbers decide about kernels takes effect one step later. Nothing is launched where the two
steps have something between them (`schedule.next_may_launch`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sparsellm.data.loader import Bookmark, TokenLoader
from sparsellm.training.counting.counters import Counters, StepReading
from sparsellm.training.objective import LossSums


class MicroBatchReader:
    """Reads the micro-batches of a step; steps count from 1.

    A rank that cannot read data continues with zeros and reports the error with the step's numbers.
    Otherwise the other ranks would wait for it in a collective until it times out.
    """

    def __init__(self, loader: TokenLoader, shape: tuple[int, int], step: int) -> None:
        self.step = step
        self.error: Exception | None = None
        self.texts_2C = np.zeros_like(loader.texts_2C)  # of its micro-batches, see `TokenLoader`
        self._loader, self._shape = loader, shape

    def next(self) -> torch.Tensor:
        """int64 (micro-batch, context_length + 1)."""
        if self.error is None:
            try:
                tokens_BT1 = next(self._loader)
                self.texts_2C += self._loader.texts_2C
                return tokens_BT1
            except (ValueError, OSError) as error:
                self.error = error
        return torch.zeros(self._shape, dtype=torch.int64)


@dataclass
class StartedStep:
    """A step whose first forward pass is queued."""

    reader: MicroBatchReader
    counters: Counters
    first_sums: LossSums  # of its first micro-batch


class NextStep:
    """Holds the next step from its launch until it is taken."""

    def __init__(self) -> None:
        self._launched: StartedStep | Exception | None = None
        self.position: Bookmark | None = None  # of the data before it, if it is launched
        self.readings: list[StepReading] = []  # since kernels were last chosen for a step

    def launch(self, position: Bookmark, start: Callable[[], StartedStep]) -> None:
        """Starts it. An error is raised only by `take`, since the step before it is complete."""
        self.position = position
        try:
            self._launched = start()
        except Exception as error:
            self._launched = error

    def take(self) -> StartedStep | None:
        """The step, if it is launched.

        Raises:
            Exception: what kept it from starting.
        """
        launched = self._launched
        self.discard()
        if isinstance(launched, Exception):
            raise launched
        return launched

    def discard(self) -> None:
        """Forgets it: its data comes again once the loader goes back to `position`."""
        self._launched = self.position = None
