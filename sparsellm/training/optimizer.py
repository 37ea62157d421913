"""The optimizer, and targeted re-initialisation of dead neurons."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsellm.ffn.module import SparseFFN
from sparsellm.recipe_sections import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices (embeddings included), none on norm vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.dim() >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


@torch.no_grad()
def reinit_dead_neurons(
    ffns: list[SparseFFN], dead_LN: Tensor, *, rate: float, std: float, seed: int, step: int
) -> None:
    """``W ← (1-rate) W + rate N(0, std²)`` for the gate rows of dead neurons, in place.

    Paper, targeted re-initialisation (rate 0.1, std 0.02). The noise depends on seed, step and
    layer alone, so that ranks agree and a resumed run repeats it.
    """
    for layer, (ffn, dead_N) in enumerate(zip(ffns, dead_LN, strict=True)):
        weight = ffn.pattern_weight
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(((seed * 1_000_003 + step) * 10_007 + layer) % 2**63)
        noise_NK = torch.randn(
            tuple(weight.shape), generator=generator, device=weight.device, dtype=weight.dtype
        )
        first, local_NK = 0, weight.data
        if isinstance(weight, DTensor):  # FSDP2: this rank holds some of the rows
            _, offset = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            first, local_NK = offset[0], weight.to_local()
        rows = slice(first, first + local_NK.shape[0])
        mixed_NK = torch.lerp(local_NK, noise_NK[rows] * std, rate)
        local_NK.copy_(torch.where(dead_N[rows, None], mixed_NK, local_NK))
