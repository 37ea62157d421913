"""One of several ranks: Muon's steps of whole, sharded and replicated matrices.

    muon_worker.py cpu   # of four ranks, test_optimizer.py
    muon_worker.py cuda  # of two, tests/gpu/test_training.py

Each layout's steps are those of `torch.optim.Muon` on whole matrices. Rows divide by neither two
nor four, one matrix has fewer rows than four ranks, and ranks have unlike shares of five matrices.
"""

from __future__ import annotations

import math
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sparsellm.training import muon
from sparsellm.training.muon import MuonAndAdamW

SHAPES = [(5, 40), (33, 16), (3, 16), (33, 16), (7, 7)]
STEPS, REFUSED = 4, 2  # the step that changes nothing
RATE, DECAY = 0.1, 0.3


def matrices(seed):
    generator = torch.Generator().manual_seed(seed)
    device = torch.get_default_device()
    return [torch.randn(s, generator=generator, device="cpu").to(device) for s in SHAPES]


def expected():
    """Of each step: the matrices after it."""
    weights = [nn.Parameter(weight) for weight in matrices(0)]
    optimizer = torch.optim.Muon(weights, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for weight, gradient in zip(weights, matrices(step + 1), strict=True):
            weight.grad = gradient
        if step != REFUSED:
            optimizer.step()
        yield [weight.detach().clone() for weight in weights]


def found(spread):
    """The same with our optimizer; ``spread`` makes of a whole matrix what each rank has of it."""
    weights = [nn.Parameter(spread(weight)) for weight in matrices(0)]
    vector = nn.Parameter(torch.ones(3))
    optimizer = MuonAndAdamW(weights, RATE, DECAY, torch.optim.AdamW([vector], fused=True))
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
    with mock.patch.object(muon, "_change", wraps=muon._change) as computed:
        for step, (right, ours) in enumerate(zip(expected(), found(spread), strict=True)):
            for shape, one, other in zip(SHAPES, right, ours, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-6), (name, step, shape)
    # Matrices of one size at the same time, each on one of the ranks.
    own = sorted(map(math.prod, SHAPES), reverse=True)[rank % size :: size]
    assert [call.args[0].numel() for call in computed.mock_calls] == STEPS * own, name


if __name__ == "__main__":
    [kind] = sys.argv[1:]
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    torch.set_default_device(kind)
    for layout in layouts(kind):
        check(*layout, dist.get_rank())
    dist.destroy_process_group()
