"""The sums of one optimizer step: accumulated on the device, read by the host once.

The copy to the host begins before the optimizer's update, and the host waits for it after: while
the GPU updates the weights, the host has read the sums and prepares the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.types import BLOCK_TOKENS
from sparsellm.runs.records import KernelStats
from sparsellm.training.distributed import all_reduce_sum
from sparsellm.training.host_copy import HostCopy
from sparsellm.training.objective import LossSums

_NEVER = 2**62  # columns: what the dense path cannot overflow


@dataclass(frozen=True)
class StepReading:
    """The sums of one step over all ranks."""

    cross_entropy_sum: float
    l1_sum: float
    gradient_norm: float  # before clipping
    stop: bool  # some rank was asked to stop
    failed: bool  # some rank had no data: there is no step
    refused: bool  # the weights stayed as they were
    kernels: KernelStats
    nnz_sum_L: list[float]  # non-zeros of all tokens
    largest_union_L: list[int]  # columns, of this rank's micro-batches


class StepSums:
    """Adds up a step's micro-batches on the device, and reads them once.

    Args:
        ffns: of each layer.
        num_tokens: of a micro-batch.
        device: where the sums live.
    """

    def __init__(self, ffns: list[SparseFFN], num_tokens: int, device: torch.device) -> None:
        capacities = [ffn.capacity_for(num_tokens) for ffn in ffns]
        self._sparse = [capacity is not None for capacity in capacities]
        # TwELL says itself what it has no room for (`LossSums.recomputed`).
        fits = [
            capacity if capacity is not None and ffn.format == "union" else _NEVER
            for ffn, capacity in zip(ffns, capacities, strict=True)
        ]
        self._capacity_L = torch.tensor(fits).to(device, non_blocking=True)
        self._blocks = 0
        self._blocks_each = -(-num_tokens // BLOCK_TOKENS)
        # Cross-entropy, L1, overflows, blocks, stop, failed; union and non-zeros of each layer.
        self._sums = torch.zeros(6 + 2 * len(ffns), dtype=torch.float64, device=device)
        self._largest_L = torch.zeros_like(self._capacity_L)

    @torch.no_grad()
    def add(self, sums: LossSums) -> None:
        """Adds one micro-batch of this rank."""
        overflows = (sums.union_L > self._capacity_L).sum()
        if sums.recomputed is not None:
            overflows = overflows + sums.recomputed
        totals = [sums.cross_entropy_sum, sums.l1_sum_L.sum(), overflows]
        self._sums[:3] += torch.stack([total.double() for total in totals])
        self._sums[6:] += torch.cat([sums.union_L, sums.nnz_LBT.sum((1, 2))])
        self._largest_L = torch.maximum(self._largest_L, sums.union_L)
        self._blocks += self._blocks_each

    def reduce(self, gradient_norm: Tensor, stop: bool, failed: bool = False) -> None:
        """Sums over ranks, on the device.

        Args:
            gradient_norm: () before clipping, the same on all ranks.
            stop: this rank was asked to stop.
            failed: this rank had no data.
        """
        # Numbers that are assigned one by one would each wait for the device.
        own = torch.tensor([self._blocks, stop, failed], dtype=torch.float64)
        self._sums[3:6].copy_(own, non_blocking=True)
        all_reduce_sum(self._sums)
        self.gradient_norm = gradient_norm.double()

    @property
    def cross_entropy_sum(self) -> Tensor:
        """() float64, after `reduce`."""
        return self._sums[0]

    @property
    def l1_sum(self) -> Tensor:
        """() float64, after `reduce`."""
        return self._sums[1]

    @property
    def failures(self) -> Tensor:
        """() float64, after `reduce`: ranks that had no data."""
        return self._sums[5]

    def send(self, refused: Tensor) -> None:
        """Begins the copy to the host, after `reduce`.

        ``refused``: (), other than zero where the step leaves the weights as they are.
        """
        last = torch.stack([self.gradient_norm, refused.double()])
        values = torch.cat([self._sums, self._largest_L.double(), last])
        self._sent = HostCopy(values)

    def read(self) -> StepReading:
        """What was sent: the only place where a step waits for the device."""
        *values, norm, refused = self._sent.read()[0].tolist()
        cross_entropy_sum, l1_sum, overflows, blocks, stops, failures = values[:6]
        num_layers = len(self._sparse)
        union_L, nnz_L, largest_L = (
            values[6 + i * num_layers : 6 + (i + 1) * num_layers] for i in range(3)
        )
        kernels = KernelStats(self._sparse, [u / blocks for u in union_L], int(overflows))
        return StepReading(
            cross_entropy_sum=cross_entropy_sum,
            l1_sum=l1_sum,
            gradient_norm=norm,
            stop=stops > 0,
            failed=failures > 0,
            refused=refused != 0,
            kernels=kernels,
            nnz_sum_L=nnz_L,
            largest_union_L=[int(largest) for largest in largest_L],
        )
