"""The few collectives that the loop needs; with one process they are no-ops."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def all_reduce_sum(tensor: Tensor) -> None:
    """Sums over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank; also a barrier."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def reshard(model: nn.Module) -> None:
    """Makes FSDP2's parameters the sharded ones again; nothing to do without FSDP2.

    A backward pass does so by itself. After a forward pass alone the modules still hold gathered
    parameters: other objects than those that the optimizer has state for.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
