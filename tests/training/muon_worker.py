"""One of several ranks: Muon's steps of whole, sharded and replicated matrices.

    muon_worker.py cpu   # of four ranks, test_optimizer.py
    muon_worker.py cuda  # of two, tests/gpu/test_training.py

Each layout's steps are those of `torch.optim.Muon` on whole matrices: to the bit on CPUs, on GPUs
within the rounding of bf16. Where neurons are normalised, they are those of one process. Rows
divide by neither two nor four, one matrix has fewer rows than four ranks, and ranks have unlike
shares of the five matrices of one shape; each multiplies at most two at once.
"""

import math
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sparsellm.training.optimization import muon
from sparsellm.training.optimization.muon import MuonAndAdamW, muon_groups

TALL = (33, 16)
SHAPES = [(5, 40), TALL, (3, 16), TALL, TALL, (7, 7), TALL, TALL, (7, 7)]
PLAIN = [None] * len(SHAPES)
NEURON_DIMS = [1, 0, None, 0, 1, 0, None, 0, 1]
SHARES = {1: [9], 2: [6, 3], 4: [5, 3, 1, 0]}  # matrices of a step, by ranks
STEPS, REFUSED = 4, 2  # the step that changes nothing
RATE, DECAY = 0.1, 0.3


def matrices(seed):
    generator = torch.Generator().manual_seed(seed)
    device = torch.get_default_device()
    return [torch.randn(s, generator=generator, device="cpu").to(device) for s in SHAPES]


def normalized(change, dim):
    """The same matrix, its rows (or columns) scaled to one norm."""
    norms = change.norm(dim=1 - dim, keepdim=True)
    scaled = change * (norms.square().mean().sqrt() / norms).clamp(max=10)
    return scaled * (change.norm() / scaled.norm())


def expected(neuron_dims):
    """Of each step: the matrices after it, and those whose neurons are normalised in fp32."""
    weights = matrices(0)
    changes = [nn.Parameter(torch.zeros_like(weight)) for weight in weights]
    optimizer = torch.optim.Muon(changes, RATE, 0, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for change, gradient in zip(changes, matrices(step + 1), strict=True):
            change.detach().zero_()
            change.grad = gradient
        if step != REFUSED:
            optimizer.step()
            updates = [
                change.detach() if dim is None else normalized(change.detach(), dim)
                for change, dim in zip(changes, neuron_dims, strict=True)
            ]
            pairs = zip(weights, updates, strict=True)
            weights = [weight * (1 - RATE * DECAY) + update for weight, update in pairs]
        yield weights


def found(spread, neuron_dims=None):
    """The same with our optimizer; ``spread`` makes of a whole matrix what each rank has of it."""
    weights = [nn.Parameter(spread(weight)) for weight in matrices(0)]
    vector = nn.Parameter(torch.ones(3))
    groups = weights
    if neuron_dims:
        pairs = zip(weights, neuron_dims, strict=True)
        groups = muon_groups(weights, {id(weight): dim for weight, dim in pairs})
    optimizer = MuonAndAdamW(groups, RATE, DECAY, torch.optim.AdamW([vector], fused=True))
    for step in range(STEPS):
        refused = step == REFUSED
        for weight, gradient in zip(weights, matrices(step + 1), strict=True):
            weight.grad = spread(gradient * torch.nan if refused else gradient)
        vector.grad = torch.ones(3)
        optimizer.found_inf = torch.tensor(float(refused))
        optimizer.step()
        yield [getattr(weight, "full_tensor", weight.clone)().detach() for weight in weights]


def layouts(device):
    """What each rank has of a whole matrix, by name; how many ranks divide the matrices."""
    ranks = dist.get_world_size()
    yield torch.clone, "DDP", ranks
    mesh = DeviceMesh(device, list(range(ranks)))
    yield lambda whole: distribute_tensor(whole, mesh, [Shard(0)]), "FSDP2", ranks
    pairs = DeviceMesh(device, torch.arange(ranks).view(2, -1).tolist())
    yield lambda whole: distribute_tensor(whole, pairs, [Replicate(), Shard(0)]), "HSDP", ranks // 2


def check(spread, name, size=1, rank=0):
    tolerance = 5e-3 if torch.get_default_device().type == "cuda" else 0  # updates are about 0.1
    with (
        mock.patch.object(muon, "BATCH_NUMEL", 2 * math.prod(TALL) + 1),
        mock.patch.object(muon, "_orthogonal", wraps=muon._orthogonal) as computed,
    ):
        for step, (right, ours) in enumerate(zip(expected(PLAIN), found(spread), strict=True)):
            for shape, one, other in zip(SHAPES, right, ours, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=tolerance), (name, step, shape)
    counts = [len(call.args[0]) for call in computed.mock_calls]
    assert max(counts) == 2 or rank % size > 1, name
    assert sum(counts) == STEPS * SHARES[size][rank % size], name


def check_normalized(spread, name):
    """Whatever a rank has of the matrices, they are those of one process; `expected` has others."""
    tolerance = 5e-3 if torch.get_default_device().type == "cuda" else 0
    with mock.patch.object(muon, "_team", return_value=muon._Team(None, 0, 1)):
        alone = list(found(torch.clone, NEURON_DIMS))
    right = expected(NEURON_DIMS)
    for step, (exact, one, ours) in enumerate(
        zip(right, alone, found(spread, NEURON_DIMS), strict=True)
    ):
        for index, shape in enumerate(SHAPES):
            where = (name, step, index, shape)
            assert torch.allclose(one[index], ours[index], rtol=0, atol=tolerance), where
            assert torch.allclose(exact[index], one[index], rtol=0, atol=tolerance or 5e-4), where


if __name__ == "__main__":
    [kind] = sys.argv[1:]
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    torch.set_default_device(kind)
    for layout in layouts(kind):
        check(*layout, dist.get_rank())
        check_normalized(*layout[:2])
    dist.destroy_process_group()
