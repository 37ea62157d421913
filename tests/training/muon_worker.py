"""One of four ranks of test_optimizer.py: Muon's steps of whole, sharded and replicated matrices.

Each layout's steps are those of `torch.optim.Muon` on whole matrices. Rows divide by neither two
nor four, one matrix has fewer rows than there are ranks, and the ranks have unlike shares of five.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sparsellm.training.muon import MuonAndAdamW

SHAPES = [(5, 40), (33, 16), (3, 16), (33, 16), (7, 7)]
STEPS, REFUSED = 4, 2  # the step that changes nothing
RATE, DECAY = 0.1, 0.3


def matrices(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected():
    """Of each step: the matrices after it."""
    weights = [nn.Parameter(weight) for weight in matrices(0)]
    muon = torch.optim.Muon(weights, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for weight, gradient in zip(weights, matrices(step + 1), strict=True):
            weight.grad = gradient
        if step != REFUSED:
            muon.step()
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


def layouts():
    """By name: what each rank has of a whole matrix."""
    ranks = dist.get_world_size()
    yield "DDP", torch.clone
    mesh = DeviceMesh("cpu", list(range(ranks)))
    yield "FSDP2", lambda whole: distribute_tensor(whole, mesh, [Shard(0)])
    pairs = DeviceMesh("cpu", torch.arange(ranks).view(2, -1).tolist())
    yield "HSDP", lambda whole: distribute_tensor(whole, pairs, [Replicate(), Shard(0)])


def check(spread, name):
    for step, (right, ours) in enumerate(zip(expected(), found(spread), strict=True)):
        for shape, one, other in zip(SHAPES, right, ours, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6), (name, step, shape)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for layout, spread in layouts():
        check(spread, layout)
    dist.destroy_process_group()
