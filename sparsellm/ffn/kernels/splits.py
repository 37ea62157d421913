"""Memory for split sums (split-K) of kernels that sum over a block's members.

``cuda/common/units.cuh`` (`Splitting`) decides which token blocks are split and where;
``cuda/common/partial_sums.cuh`` adds up the parts. Results are deterministic, but their bits differ
from those of an unsplit sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import exported_like, load_like
from sparsellm.ffn.kernels.gpu_architecture import architecture_of
from sparsellm.ffn.types import BLOCK_TOKENS

MAX_PARTS = 32  # of all token blocks that are split


@dataclass(frozen=True)
class Splits:
    """The list of parts, uninitialised; used once, by one kernel that sums."""

    part: Tensor  # (32, 2) int32
    arrived: Tensor  # (32 · slices,) int32
    slices: int  # of the result's columns
    slice_columns: int
    workers: int  # blocks of threads that share the work

    def for_sharing(self) -> tuple[object, ...]:
        """The arguments of union_entries and column_units."""
        sizes = (np.int32(MAX_PARTS), np.int32(self.slices), np.int32(self.workers))
        return (self.part, self.arrived, *sizes)

    def for_sums(self) -> tuple[object, ...]:
        """The arguments of the kernel that sums, with memory for the sums of the parts."""
        size = MAX_PARTS * self.slices * BLOCK_TOKENS * self.slice_columns
        sums = torch.empty(size, dtype=torch.float32, device=self.part.device)
        return (self.part, self.arrived, sums)


NO_SHARING: tuple[object, ...] = (None, None, np.int32(0), np.int32(0), np.int32(1))
NO_SUMS: tuple[object, ...] = (None, None, None)


def allocate_splits(x_MK: Tensor, num_neurons: int) -> Splits | None:
    """Memory for the FFN of these tokens; None where no token block can be heavy."""
    num_tokens, hidden_size = x_MK.shape
    if num_tokens <= BLOCK_TOKENS:
        return None
    if num_neurons <= exported_like("column_units", "min_part", x_MK):
        return None
    down = architecture_of(x_MK.get_device()).down
    slice_columns = exported_like(down.kernel, "columns", x_MK)
    slices = -(-hidden_size // slice_columns)
    ints = torch.empty(MAX_PARTS * (2 + slices), dtype=torch.int32, device=x_MK.device)
    return Splits(
        part=ints[: 2 * MAX_PARTS].view(MAX_PARTS, 2),
        arrived=ints[2 * MAX_PARTS :],
        slices=slices,
        slice_columns=slice_columns,
        workers=load_like("column_units", x_MK).num_multiprocessors * down.blocks,
    )
