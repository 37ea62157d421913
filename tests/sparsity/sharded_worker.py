"""One rank of test_sharded.py: a loop of one's own under FSDP2, beside the same without it.

``sharded_worker.py OUT``: the main rank writes the largest relative error of a gradient, and the
statistics of both, for each way to run a block.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_controller import L, Model, by_hand, controlled
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

COEFFICIENT = 2e-3


class ShardedModel(Model):
    """Its FFNs are sharded one by one, and may be recomputed."""

    def block(self, i, x):
        ffn = self.ffns[i]
        normed = self.norms[i](x)
        return x + (
            checkpoint(ffn, normed, use_reentrant=False) if self.checkpointed else ffn(normed)
        )

    def forward(self, x):
        for i in range(L):
            x = self.block(i, x)
        return x


def compare(kernels, checkpointed, whole):
    """Two micro-batches of each rank, against all of them at once on one rank."""
    expected_model = Model(kernels)
    loss, l1_L, gates = by_hand(expected_model, whole)
    (loss + COEFFICIENT * l1_L.sum() / (whole.numel() // whole.shape[-1] * L)).backward()
    expected = {n: p.grad for n, p in expected_model.named_parameters()}
    model = ShardedModel(kernels)
    model.checkpointed = checkpointed
    for ffn in model.ffns:
        fully_shard(ffn)
    fully_shard(model)
    controller, optimizer = controlled(model, l1_coefficient=COEFFICIENT)
    rank_batches = whole.chunk(dist.get_world_size())[dist.get_rank()].chunk(2)
    for index, x in enumerate(rank_batches):
        model.set_requires_gradient_sync(index == 1)
        ((model(x).square().mean() + controller.l1_loss()) / 2).backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    optimizer.step()
    controller.step()
    nnz = torch.stack([(gate != 0).sum(1) for gate in gates]).double().mean(1)
    return {
        "error": max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.items()),
        "nnz": controller.statistics().nnz_mean,
        "expected_nnz": nnz.tolist(),
        "tokens": controller.statistics().num_tokens,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = torch.randn(8, 20, 16, generator=torch.Generator().manual_seed(3))
    ways = [("dense", False), ("sparse", False), ("sparse", True)]
    results = [compare(kernels, recomputed, batch) for kernels, recomputed in ways]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
