"""Sums and maxima over ranks, of a single process its own values; warnings of all ranks once."""

import warnings
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks


def all_reduce_sum(tensor: Tensor, group: Group = None) -> None:
    """Sums over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group)


def largest(value: int, device: torch.device, group: Group = None) -> int:
    """The largest of all ranks' values; also a barrier."""
    if not dist.is_initialized():
        return value
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values.item())


def any_rank(flag: bool, device: torch.device, group: Group = None) -> bool:
    """Whether ``flag`` holds on any rank; also a barrier."""
    return bool(largest(int(flag), device, group))


def warn_on_first_rank(message: str, stacklevel: int) -> None:
    """Warns on the first rank only; the levels count from here."""
    if not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(message, stacklevel=stacklevel)
