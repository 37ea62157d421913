"""Muon for matrices, AdamW for everything else, on one rank or many.

Muon orthogonalises whole matrices. Those of one shape are multiplied in batches, since the host
takes longer to start the products of one matrix than a GPU to compute them. Ranks divide a batch
among themselves: each computes the updates of some matrices, and sends them to the others. Where
weights are sharded (FSDP2, HSDP), a rank first receives all shards of the matrices whose updates it
computes, and sends each other rank only that rank's shard of an update. `muon_passes` has what is
computed for all numbers before and after the products.

`torch.optim.Muon` alone would compute every matrix on every rank, and multiply shards with
collectives between the products. On eight H200 its step of 2b's matrices took 186 ms under DDP and
2,323 ms under FSDP2, where AdamW's takes 14 ms (benchmarks/optimizer_step.py, commit cf8ad2d). With
one matrix after the other, divided among four H200, it took 104 ms under FSDP2, of which kernels
ran for 42 (0e6f9ed).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsellm.ffn.kernels.transpose import mirror_strip
from sparsellm.training.optimization.muon_passes import add_updates, advance_momenta
from sparsellm.training.optimization.neurons import normalize_neurons

Group = dict[str, Any]  # of an optimizer's parameters, with their settings

# How many numbers the matrices have that one rank multiplies at once, unless a single one has more.
# Of 2b's FFNs these are four.
BATCH_NUMEL = 3 * 2**24
# Of symmetric products with at least so many numbers only what lies right of the diagonal is
# computed, in so many strips of rows. Smaller ones would leave multiprocessors idle. On one H200 a
# step of 2b's matrices takes 155 ms with whole products, 145 with two strips, and 141 with four.
SYMMETRIC_NUMEL, STRIPS = 2**24, 4


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, `torch.optim.AdamW` for all other parameters.

    Muon's update of an (A, B) matrix is scaled by ``0.2 √max(A, B)``, to the root mean square of
    AdamW's updates. So one learning rate and one decoupled weight decay serve both.

    Args:
        matrices: that Muon updates, or groups of them from `muon_groups`; a step may overwrite
            their gradients.
        lr: of Muon, at its peak.
        weight_decay: of Muon.
        adamw: of all other parameters.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor] | Sequence[Group],
        lr: float,
        weight_decay: float,
        adamw: torch.optim.AdamW,
    ) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay)
        self._num_muon_groups = len(muon.param_groups)
        self._adamw = adamw
        self.found_inf: Tensor | None = None
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters, or none where ``found_inf`` is 1."""
        assert closure is None
        muon_groups = self.param_groups[: self._num_muon_groups]
        first = muon_groups[0]["params"][0]
        team, refused = _team(first), self._refused(first.device)
        # A batch goes through three stages. What a stage sends arrives while the next one computes
        # for an earlier batch.
        directions = updates = None
        for batch in [*_batches(muon_groups, team.size), None, None]:
            sent = self._send_directions(*batch, team, refused) if batch else None
            multiplied = _send_updates(directions) if directions else None
            if updates:
                _apply(updates, refused)
            directions, updates = sent, multiplied
        # accelerate replaces groups and state, so AdamW is given them at every step.
        self._adamw.state = self.state
        self._adamw.param_groups = self.param_groups[self._num_muon_groups :]
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _send_directions(
        self, matrices: list[Tensor], group: Group, team: "_Team", refused: Tensor
    ) -> "_Transit":
        """Advances the momentum. The direction of a matrix goes to the rank that multiplies it.

        It goes in bf16, since Muon begins with the rounding, and half of the bytes are sent.
        """
        gradients = [_gradient(matrix) for matrix in matrices]
        momenta = [self._momentum(matrix) for matrix in matrices]
        shares = _chunks(len(matrices), team.size)
        first = sum(shares[: team.rank])
        sent = slice(None) if team.shards else slice(first, first + shares[team.rank])
        shape = momenta[0].shape
        directions = momenta[0].new_empty((len(momenta[sent]), *shape), dtype=torch.bfloat16)
        filled: list[Tensor | None] = [None] * len(matrices)
        filled[sent] = list(directions)
        advance_momenta(momenta, gradients, filled, group["momentum"], refused)
        if not team.shards:  # this rank needs no others
            return _Transit(matrices, group, team, directions)
        sent_sizes = [share * shape.numel() for share in shares]
        numel = shares[team.rank] * shape[1]  # of one row of all matrices
        sizes = [numel * rows for rows in _chunks(matrices[0].shape[0], team.size)]
        received = _exchange(directions.flatten(), sent_sizes, sizes, team)
        return _Transit(matrices, group, team, *received)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return _local(state["momentum_buffer"])

    def _refused(self, device: torch.device) -> Tensor:
        """Whether ``found_inf`` is 1: bool, ()."""
        if self.found_inf is None:
            return torch.zeros((), dtype=torch.bool, device=device)
        return self.found_inf.bool()


def muon_groups(matrices: Iterable[Tensor], neuron_dims: Mapping[int, int]) -> list[Group]:
    """Groups of Muon's matrices for `MuonAndAdamW`, by the dimension along which neurons lie.

    Args:
        matrices: that Muon updates.
        neuron_dims: of those whose neurons are normalised, by `id`: 0 where a row belongs to a
            neuron, 1 where a column does.
    """
    by_dim: dict[int | None, list[Tensor]] = {}
    for matrix in matrices:
        by_dim.setdefault(neuron_dims.get(id(matrix)), []).append(matrix)
    return [{"params": params, "neuron_dim": dim} for dim, params in by_dim.items()]


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


class _Transit(NamedTuple):
    """What this rank receives about matrices of one shape and group."""

    matrices: list[Tensor]
    group: Group
    team: _Team
    numbers: Tensor  # bf16
    exchange: dist.Work | None = None  # in which they arrive

    def arrived(self) -> Tensor:
        """The numbers; the device waits until it has them."""
        if self.exchange is not None:
            self.exchange.wait()
        return self.numbers


def _batches(groups: Sequence[Group], ranks: int) -> Iterator[tuple[list[Tensor], Group]]:
    """Divides matrices with a gradient into batches, each of which ranks compute at the same time.

    Those of a batch have one shape and group.
    """
    for group in groups:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for shape, alike in by_shape.items():
            most = ranks * max(1, BATCH_NUMEL // shape.numel())
            yield from ((alike[i : i + most], group) for i in range(0, len(alike), most))


def _send_updates(directions: _Transit) -> _Transit:
    """Computes the updates of this rank's matrices of a batch. Each rank is sent its part."""
    matrices, group, team, *_ = directions
    rows, columns = matrices[0].shape
    shares = _chunks(len(matrices), team.size)
    share = shares[team.rank]
    numbers = directions.arrived()
    if not team.shards:
        updates = _updates(numbers, group)
        return _Transit(matrices, group, team, *_gather(updates, shares[0], team))
    heights = _chunks(rows, team.size)
    sent_sizes = [share * height * columns for height in heights]
    shards = numbers.split(sent_sizes)
    whole = [s.view(share, height, columns) for s, height in zip(shards, heights, strict=True)]
    updates = _updates(torch.cat(whole, dim=1), group)
    sent = torch.empty_like(numbers)
    for shard, place in zip(updates.split(heights, dim=1), sent.split(sent_sizes), strict=True):
        place.view(shard.shape).copy_(shard)
    height = heights[team.rank]
    sizes = [count * height * columns for count in shares]
    received, work = _exchange(sent, sent_sizes, sizes, team)
    mine = received.view(len(matrices), height, columns)
    return _Transit(matrices, group, team, mine, work)


def _apply(updates: _Transit, refused: Tensor) -> None:
    """Decays the matrices of a batch, and adds their updates."""
    matrices, group, *_ = updates
    rate = group["lr"] * (0.2 * math.sqrt(max(matrices[0].shape)))
    decay = 1 - group["lr"] * group["weight_decay"]
    local = [_local(matrix) for matrix in matrices]
    add_updates(local, updates.arrived()[: len(local)], decay, -rate, refused)


def _chunks(total: int, parts: int) -> list[int]:
    """The sizes of the parts into which `torch.chunk` divides ``total``; the last may be 0."""
    most = -(-total // parts)
    return [min(most, max(total - i * most, 0)) for i in range(parts)]


def _gather(part: Tensor, most: int, team: _Team) -> tuple[Tensor, dist.Work | None]:
    """The parts of all ranks, one after the other, each filled up to ``most`` matrices."""
    if team.size == 1:
        return part, None
    parts = part.new_empty((team.size * most, *part.shape[1:]))
    padded = parts[team.rank * most : (team.rank + 1) * most]
    padded[: len(part)] = part
    return parts, dist.all_gather_into_tensor(parts, padded, group=team.group, async_op=True)


def _exchange(
    sent: Tensor, sent_sizes: list[int], sizes: list[int], team: _Team
) -> tuple[Tensor, dist.Work | None]:
    """Sends the i-th part to rank i. Receives so many numbers from each rank, one after the other.

    Each rank receives as many bytes as its share of the matrices has. When it gathered all of them,
    a step of 2b took 376 ms under FSDP2 on four H200, instead of 143 (b5ae09d, d381fa7).
    """
    received = sent.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        received, sent, sizes, sent_sizes, group=team.group, async_op=True
    )
    return received, work


def _updates(directions: Tensor, group: Group) -> Tensor:
    """The updates of whole matrices with these directions, bf16 (matrices, rows, columns)."""
    updates = _orthogonal(directions, group)
    dim = group.get("neuron_dim")
    return updates if dim is None else normalize_neurons(updates, dim)


def _orthogonal(directions: Tensor, group: Group) -> Tensor:
    """Orthogonalises bf16 (matrices, rows, columns) as `torch.optim.Muon` does one matrix.

    A batched product may take another kernel than a single one, and add up in another order. Tall
    matrices are not transposed, but the products are: so no matrix is copied for it.
    """
    if not len(directions):
        return directions
    a, b, c = group["ns_coefficients"]
    tall = directions.shape[1] > directions.shape[2]
    norms = torch.stack([matrix.norm() for matrix in directions]).clamp(min=group["eps"])
    x = directions / norms[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = _times_own_transpose(x.mT if tall else x)
        factor = _times_own_transpose(gram, gram, beta=b, alpha=c)
        left, right = (x, factor.mT) if tall else (factor, x)
        x = torch.baddbmm(x, left, right, beta=a)
    return x


def _times_own_transpose(
    x: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """``alpha x xᵀ + beta added``, a symmetric matrix for each of x.

    Args:
        x: (matrices, rows, columns).
        added: (matrices, rows, rows), symmetric, or None.
        beta, alpha: factors.
    """
    size = x.shape[1]
    # Strips begin at multiples of 16 bytes.
    if len(x) * size**2 < SYMMETRIC_NUMEL or size % (8 * STRIPS) != 0:
        return x @ x.mT if added is None else torch.baddbmm(added, x, x.mT, beta=beta, alpha=alpha)
    out = x.new_empty((len(x), size, size))
    height = size // STRIPS
    for start in range(0, size, height):
        end = start + height
        rows, right = slice(start, end), slice(start, None)
        strip, factors = out[:, rows, right], (x[:, rows], x[:, right].mT)
        summand = strip if added is None else added[:, rows, right]  # beta = 0 ignores a strip
        torch.baddbmm(summand, *factors, beta=beta, alpha=alpha, out=strip)
        mirror_strip(out, start, end)
    return out


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return _local(matrix.grad)


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it; on DTensors each operation takes 30 µs longer."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
