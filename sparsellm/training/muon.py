"""Muon for matrices, AdamW for everything else, on one rank or many.

Muon orthogonalises whole matrices. Ranks divide them among themselves: each computes the updates
of some, and sends them to the others. Where weights are sharded (FSDP2, HSDP), a rank first
receives all shards of the matrices whose updates it computes, and sends each other rank only that
rank's shard of an update.

`torch.optim.Muon` alone would compute every matrix on every rank, and multiply shards with
collectives between the products. On eight H200 its step of 2b's matrices took 186 ms under DDP and
2,323 ms under FSDP2, where AdamW's takes 14 ms (benchmarks/optimizer_step.py, commit cf8ad2d). As
it is here, it takes 107 ms under DDP and 143 ms under FSDP2, on four H200 (d381fa7).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Group = dict[str, Any]  # of an optimizer's parameters, with their settings


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, `torch.optim.AdamW` for all other parameters.

    Muon's update of an (A, B) matrix is scaled by ``0.2 √max(A, B)``, to the root mean square of
    AdamW's updates. So one learning rate and one decoupled weight decay serve both.

    Args:
        matrices: that Muon updates.
        lr: of Muon, at its peak.
        weight_decay: of Muon.
        adamw: of all other parameters.
    """

    def __init__(
        self, matrices: Sequence[Tensor], lr: float, weight_decay: float, adamw: torch.optim.AdamW
    ) -> None:
        # Ranks compute at the same time, so matrices of one size belong together.
        matrices = sorted(matrices, key=Tensor.numel, reverse=True)
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay)
        self._adamw = adamw
        self.found_inf: Tensor | None = None
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters, or none where ``found_inf`` is 1."""
        assert closure is None
        first, *others = self.param_groups
        team = _team(first["params"][0])
        matrices = [p for p in first["params"] if p.grad is not None]
        for begin in range(0, len(matrices), team.size):
            batch = matrices[begin : begin + team.size]
            updates = [self._advance_momentum(parameter, first) for parameter in batch]
            changes = _orthogonal(updates, [p.shape for p in batch], first, team)
            for parameter, change in zip(batch, changes, strict=True):
                decayed = _local(parameter) * (1 - first["lr"] * first["weight_decay"])
                self._assign(parameter, decayed + change)
        # accelerate replaces groups and state, so AdamW is given them at every step.
        self._adamw.state, self._adamw.param_groups = self.state, others
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _advance_momentum(self, parameter: Tensor, group: Group) -> Tensor:
        """The direction of the step by Nesterov's momentum, bf16, what this rank holds of it."""
        state = self.state[parameter]
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = _local(parameter.grad)  # on DTensors each operation takes 30 µs longer
        momentum = _local(state["momentum_buffer"]).lerp(gradient, 1 - group["momentum"])
        self._assign(state["momentum_buffer"], momentum)
        # In bf16, since Muon begins with the rounding, and half of the bytes are sent.
        return torch.lerp(gradient, momentum, group["momentum"]).bfloat16()

    def _assign(self, tensor: Tensor, local: Tensor) -> None:
        """``tensor`` becomes ``local`` on this rank, unless ``found_inf`` is 1."""
        own = _local(tensor)
        if self.found_inf is not None:
            local = torch.where(self.found_inf.bool(), own, local)
        own.copy_(local)


class _Team(NamedTuple):
    """The ranks that divide a step's matrices among themselves."""

    group: dist.ProcessGroup | None
    rank: int  # of this process
    size: int
    shards: bool = False  # each has a shard of every matrix, instead of all of it


def _team(matrix: Tensor) -> _Team:
    """All ranks under DDP, under FSDP2 and HSDP those that have shards of one copy of the model."""
    if isinstance(matrix, DTensor):
        mesh = matrix.device_mesh
        [axis] = [i for i, placement in enumerate(matrix.placements) if placement.is_shard()]
        return _Team(mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis), True)
    if dist.is_initialized():
        return _Team(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    return _Team(None, 0, 1)


def _orthogonal(
    updates: Sequence[Tensor], shapes: Sequence[torch.Size], group: Group, team: _Team
) -> Iterator[Tensor]:
    """What Muon adds to each matrix, fp32, this rank's part of it; at most one matrix per rank.

    ``updates`` are what this rank holds of them, ``shapes`` those of the whole matrices.
    """
    if team.shards:
        yield from _orthogonal_shards(updates, shapes, group, team)
        return
    own = _change(updates[team.rank], group) if team.rank < len(updates) else None
    for owner, update in enumerate(updates):
        change = own
        if change is None or owner != team.rank:
            change = torch.empty_like(update, dtype=torch.float32)
        if team.size > 1:
            dist.broadcast(change, group=team.group, group_src=owner)
        yield change


def _orthogonal_shards(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], group: Group, team: _Team
) -> list[Tensor]:
    """The same of sharded matrices: rank i gathers the i-th, and scatters what becomes of it.

    In these two collectives each rank receives the bytes of one matrix. Gathering every matrix on
    every rank takes as many times that as there are ranks, and as many collectives as matrices:
    376 ms per step of 2b instead of 143, on four H200 (b5ae09d, d381fa7).
    """
    mine = shapes[team.rank] if team.rank < len(shapes) else torch.Size((0, 0))
    rows = _rows_of_shards(mine[0], team.size)
    whole = torch.cat(_exchange(shards, [torch.Size((n, mine[1])) for n in rows], team))
    change = _change(whole, group) if mine.numel() else whole.float()
    return _exchange(change.split(rows), [shard.shape for shard in shards], team)


def _rows_of_shards(rows: int, shards: int) -> list[int]:
    """How many rows each shard of a matrix has: as many as its chunk has (`torch.chunk`)."""
    most = -(-rows // shards)
    return [min(most, max(rows - i * most, 0)) for i in range(shards)]


def _exchange(parts: Sequence[Tensor], shapes: Sequence[torch.Size], team: _Team) -> list[Tensor]:
    """Sends the i-th part to rank i. Returns what ranks sent to this one, which has these shapes.

    Where there are fewer parts or shapes than ranks, the last ranks get or send nothing.
    """
    numbers_in = [shape.numel() for shape in shapes]
    numbers_out = [part.numel() for part in parts]
    sent = torch.cat([part.flatten() for part in parts])
    received = sent.new_empty(sum(numbers_in))
    none_in, none_out = ([0] * (team.size - len(n)) for n in (numbers_in, numbers_out))
    dist.all_to_all_single(
        received, sent, numbers_in + none_in, numbers_out + none_out, group=team.group
    )
    found = zip(received.split(numbers_in), shapes, strict=True)
    return [part.view(shape) for part, shape in found]


def _change(update: Tensor, group: Group) -> Tensor:
    """What one step of `torch.optim.Muon` without momentum makes of a matrix of zeros."""
    matrix = nn.Parameter(torch.zeros_like(update, dtype=torch.float32))
    matrix.grad = update.float()
    settings = {"lr": group["lr"], "weight_decay": 0, "momentum": 0, "nesterov": False}
    torch.optim.Muon([matrix], adjust_lr_fn="match_rms_adamw", **settings).step()
    return matrix.detach()


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
