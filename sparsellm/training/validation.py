"""Validation loss: the same sequences every time, whatever the number of ranks."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sparsellm.processes.distributed import agree
from sparsellm.sparsity.over_ranks import all_reduce_sum, largest
from sparsellm.training.objective import IGNORED_TARGET, reshard


class ValidationSet:
    """This rank's share of the held-out sequences, read once and kept (int32, host memory).

    Ranks run equally many micro-batches of the same shape (FSDP2's collectives and compiled code
    need that): if the sequences do not divide evenly, the rest is padding with ignored targets.
    """

    def __init__(self, batches: Iterable[Tensor], micro_batch_size: int, device: torch.device):
        self._tokens_ST1 = torch.cat([batch_BT1.int() for batch_BT1 in batches])
        self._micro_batch_size = micro_batch_size
        self._num_batches = -(-largest(len(self._tokens_ST1), device) // micro_batch_size)

    @torch.no_grad()
    def loss(
        self,
        objective: nn.Module,
        accelerator: Accelerator,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> tuple[float, int]:
        """Mean cross-entropy over all ranks' targets (nats per token), and their number.

        Args:
            objective: `Objective`, wrapped or not; is in training mode before and after.
            accelerator: of the ranks.
            interrupted: asked after each micro-batch.

        Raises:
            FailedTogether: some rank failed. Under FSDP2 the rank's own error is raised instead,
                since the other ranks wait in a collective and cannot agree on it.
            Interrupted: some rank was interrupted.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        if isinstance(objective, DistributedDataParallel):
            # DDP's forward broadcasts buffers: the others would wait for a rank that has failed.
            objective = objective.module
        objective.eval()
        try:
            for index in range(self._num_batches):
                error = None
                try:
                    self._add_batch(index, objective, accelerator, sums)
                except Exception as met:
                    if isinstance(objective, FSDPModule):
                        raise
                    error = met
                agree(error, interrupted(), accelerator.device)
        finally:
            objective.train()
            reshard(objective)
        all_reduce_sum(sums)
        total, count = sums.tolist()
        return total / count, int(count)

    def _add_batch(
        self, index: int, objective: nn.Module, accelerator: Accelerator, sums: Tensor
    ) -> None:
        inputs_BT, targets_BT = self._batch(index, accelerator.device)
        with accelerator.autocast():
            parts = objective(inputs_BT, targets_BT)
        sums[0] += parts.cross_entropy_sum
        sums[1] += (targets_BT != IGNORED_TARGET).sum()

    def _batch(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        first = index * self._micro_batch_size
        tokens_bT1 = self._tokens_ST1[first : first + self._micro_batch_size].long()
        missing = self._micro_batch_size - tokens_bT1.shape[0]
        inputs_BT = F.pad(tokens_bT1[:, :-1], (0, 0, 0, missing))
        targets_BT = F.pad(tokens_bT1[:, 1:], (0, 0, 0, missing), value=IGNORED_TARGET)
        return inputs_BT.to(device), targets_BT.to(device)
