"""How many sequences a rank computes at once, if ``train.micro_batch_size`` is ``auto``.

The first size is the largest that the estimate of a dense step's memory allows. Sizes are powers of
two that divide a rank's share of the global batch, so there are few to try.
"""

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from sparsellm.ffn.training_path.capacity import SHRUNK_STEPS
from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import estimate_memory
from sparsellm.sparsity.over_ranks import largest

ROOM = 0.9  # share of a device's memory that a step may need; the rest is left to the allocator
MAX_GROWTH = 4  # times the first size
# A layer that becomes sparse reserves memory for the worst case. Only after this many steps does it
# reserve no more than it needs.
CALM_STEPS = SHRUNK_STEPS + 2


@dataclass
class MicroBatch:
    """The present size, the same on all ranks, and when it may grow.

    Args:
        size: sequences that a rank computes at once.
        largest: the largest size that it may become.
    """

    size: int
    largest: int
    stays: bool = False  # a larger one did not fit
    calm_steps: int = 0  # since the size or a layer's path changed
    paths: tuple[bool, ...] = ()  # of the last step: sparse, by layer
    saved: dict[str, Any] | None = None  # `state_dict` of the checkpoint that the run resumed from

    def observe(self, sparse: list[bool]) -> bool:
        """After a step: whether it is time to try the double size."""
        self.calm_steps = self.calm_steps + 1 if tuple(sparse) == self.paths else 0
        self.paths = tuple(sparse)
        if self.stays or 2 * self.size > self.largest or not any(sparse):
            return False
        return self.calm_steps > 0 and self.calm_steps % CALM_STEPS == 0

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues."""
        return {
            "size": self.size,
            "stays": self.stays,
            "calm_steps": self.calm_steps,
            "paths": list(self.paths),
        }


def first_micro_batch(recipe: Recipe, accelerator: Accelerator) -> MicroBatch:
    """The recipe's size, or for ``auto`` one that fits with dense layers; all ranks call it."""
    size = recipe.train.micro_batch_size
    if size != "auto":
        return MicroBatch(size, size)
    ranks = accelerator.num_processes
    shards = num_shards(accelerator)
    room = ROOM * -largest(-device_memory(accelerator.device), accelerator.device)
    sizes = possible_sizes(recipe, ranks)
    fitting = [
        size
        for size in sizes
        if estimate_memory(recipe.with_micro_batch(size), shards, ranks).total <= room
    ]
    first = max(fitting, default=1)
    return MicroBatch(first, largest=max(s for s in sizes if s <= MAX_GROWTH * first))


def possible_sizes(recipe: Recipe, num_ranks: int) -> list[int]:
    """Powers of two that divide the sequences of a rank's step, ascending."""
    sequences = recipe.accumulation_steps(num_ranks) * recipe.micro_batch_sequences
    return [2**i for i in range(sequences.bit_length()) if sequences % 2**i == 0]


def num_shards(accelerator: Accelerator) -> int:
    """Ranks over which weights and optimizer state are divided."""
    if not accelerator.is_fsdp2:
        return 1
    mesh = accelerator.parallelism_config
    return int(mesh.dp_shard_size if mesh is not None else accelerator.num_processes)


def device_memory(device: torch.device) -> int:
    """Bytes that this rank may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def memory_used(device: torch.device) -> tuple[int, int] | None:
    """Bytes allocated now, and at most since the last record of a step; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
