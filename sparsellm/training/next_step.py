"""The next step, whose first forward pass is queued before the numbers of the last one are read.

The host must read a step's numbers before it can log them and adapt λ. That read waits for the GPU,
and the host then needs 4 to 5 ms until the next forward pass runs. So the loop has `train_step`
launch the next step's first forward pass before it waits. The GPU is then idle for 2.8% of a step
instead of 6.7% (recipe `small`, one H200, micro-batch 32, steps of 86 and 89 ms, commit d8526f9).

The update of weights and statistics is queued by then, and λ enters only after the forward pass.
What the numbers decide about kernels takes effect one step later. Nothing is launched where the two
steps have something between them (`schedule.next_may_launch`).
"""

from dataclasses import dataclass

from sparsellm.data.loader import Bookmark, MicroBatchReader
from sparsellm.training.counting.counters import Counters
from sparsellm.training.objective import LossSums


@dataclass
class StartedStep:
    """A step whose first forward pass is queued."""

    reader: MicroBatchReader
    num_micro_batches: int  # of this rank
    counters: Counters
    first_sums: LossSums  # of its first micro-batch


@dataclass
class QueuedStep:
    """The next step, until it is taken. If it is dropped, the loader must go back to `position`."""

    position: Bookmark  # of the data before it
    step: StartedStep | None = None
    error: Exception | None = None  # that kept it from starting
