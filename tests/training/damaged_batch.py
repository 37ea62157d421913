"""`sparsellm` with one damaged batch: ``damaged_batch.py RANK STEP train …``.

On that rank every token that the step reads is the same byte, which text does not hold.
"""

from __future__ import annotations

import os
import sys

import torch

from sparsellm.cli import main
from sparsellm.training import loop


def damage(step: int) -> None:
    """Has the loop read the batch."""
    real = loop._Reader.next

    def next_batch(reader: loop._Reader) -> torch.Tensor:
        tokens_BT1 = real(reader)
        return torch.full_like(tokens_BT1, 255) if reader._run.step + 1 == step else tokens_BT1

    loop._Reader.next = next_batch


if __name__ == "__main__":
    rank, step, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        damage(int(step))
    sys.exit(main(arguments))
