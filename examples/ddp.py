"""Sparse training in plain PyTorch: ``torchrun --nproc_per_node=2 examples/ddp.py TEXT_FILE``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsellm

VOCABULARY, WIDTH, LENGTH = 256, 64, 64


class Block(nn.Module):
    """Attention and FFN, each under a norm."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.ffn = sparsellm.SparseFFN(WIDTH, 4 * WIDTH, activation="relu2", gated=False)

    def forward(self, x):
        normed, mask = self.norms[0](x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.ffn(self.norms[1](x))


def main(path):
    """Joins the other ranks, and leaves them once DDP's model is gone.

    If the model were the last owner of the process group, it would wait for gloo's threads while
    holding Python's lock, for which one of them may be waiting.
    """
    dist.init_process_group("gloo")
    train(path)
    dist.destroy_process_group()


def train(path):
    """Trains a tiny model on a file for a few seconds, each rank on its own blocks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    model = DistributedDataParallel(nn.Sequential(embedding, Block(), Block(), head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    controller = sparsellm.SparsityController(
        model, optimizer, target_nnz=24, l1_coefficient=1e-3, warmup_steps=10
    )
    ids = torch.tensor(list(Path(path).read_bytes()))
    blocks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[rank::num_ranks]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(60):
        batch = blocks[torch.randint(len(blocks), (4,), generator=generator)]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + controller.l1_loss()).backward()
        optimizer.step()
        controller.step()
        optimizer.zero_grad()
    statistics = controller.statistics()  # over all ranks
    if rank == 0:
        print(f"loss {loss:.2f}, {statistics.num_tokens} tokens per step")
        print(f"neurons active for a token, by layer: {statistics.nnz_mean}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
