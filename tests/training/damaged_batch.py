"""`sparsellm` with one damaged batch: ``damaged_batch.py KIND RANK STEP train …``.

On that rank every token that the step reads is the same byte, which text does not hold
(``damage``), or its loss is NaN (``spoil``).
"""

import math
import os
import sys
from collections.abc import Callable

import torch

from sparsellm.cli import main
from sparsellm.data.loader import MicroBatchReader
from sparsellm.training import loop, step as step_module


def damage(is_damaged: Callable[[int], bool]) -> None:
    """Has the loop read the batches of some steps as damaged."""
    real = MicroBatchReader.next

    def next_batch(reader: MicroBatchReader) -> torch.Tensor:
        tokens_BT1 = real(reader)
        return torch.full_like(tokens_BT1, 255) if is_damaged(reader.step) else tokens_BT1

    MicroBatchReader.next = next_batch


def spoil(is_spoilt: Callable[[int], bool]) -> None:
    """Makes the loss, and with it every gradient, NaN in some steps."""
    real_step, real_loss = loop.train_step, step_module.total_loss

    def train_step(run, stop, **options):
        spoilt = is_spoilt(run.step + 1)
        step_module.total_loss = (lambda *a: real_loss(*a) * math.nan) if spoilt else real_loss
        return real_step(run, stop, **options)

    loop.train_step = train_step


if __name__ == "__main__":
    kind, rank, step, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        {"damage": damage, "spoil": spoil}[kind](int(step).__eq__)
    sys.exit(main(arguments))
