"""The micro-batches of one step, and what they share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparsellm.ffn.fills import Fills
from sparsellm.training.distributed import accumulating
from sparsellm.training.objective import total_loss
from sparsellm.training.run import Run


def accumulation(run: Run, rounds: int) -> Iterator[None]:
    """Iterates over the micro-batches of a step; prepares what they share before the first one."""
    begin_sharing(run, accumulate=rounds > 1)
    for _ in range(rounds - 1):
        with accumulating(run.accelerator, run.objective):
            yield
    for part in run.sharing:
        part.end_accumulation()
    yield
    for part in run.sharing:
        part.end_step()


def begin_sharing(run: Run, accumulate: bool) -> None:
    """Prepares what the micro-batches of a step share; ``accumulate``: there are several."""
    with Fills() as fills:
        for part in run.sharing:
            part.begin_step(run.compute_dtype, accumulate, fills)


def rehearse(run: Run) -> None:
    """Forward and backward of one micro-batch of zeros, whose gradients are to be discarded."""
    accelerator = run.accelerator
    shape = (run.micro_batch.size, run.recipe.model.context_length)
    tokens_BT = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
    with accelerator.autocast():
        sums = run.objective(tokens_BT, tokens_BT)
    accelerator.backward(total_loss(sums, 0.0, tokens_BT.numel(), accelerator.num_processes))
