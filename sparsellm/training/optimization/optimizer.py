"""The optimizer, and targeted re-initialisation of dead neurons."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.recipe import Recipe
from sparsellm.recipe.sections import OptimizerConfig
from sparsellm.training.optimization.muon import MuonAndAdamW, muon_groups


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer; weight decay on matrices (embeddings included), none on norm vectors.

    Whoever sets learning rates multiplies a group's by its ``lr_scale``, if it has one. A step
    changes nothing if the optimizer's attribute ``found_inf``, a tensor (), is 1; the host does not
    wait for its value.
    """
    config = recipe.optimizer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = {name: p for name, p in named if p.dim() >= 2}
    vectors = [p for _, p in named if p.dim() < 2]
    muons, gates = {}, {}
    if config.name == "muon":
        muons = {name: p for name, p in matrices.items() if "layers" in name.split(".")}
    if recipe.gates_by_adamw:
        # L1 pushes every gate row along the mean of x, one direction of the matrix. Muon makes the
        # update equally large in all directions: λ then has to rise until it drowns the loss. Dense
        # models are trained alike (`OptimizerConfig.gate_peak`).
        patterns = {id(m.pattern_weight) for m in model.modules() if isinstance(m, SparseFFN)}
        gates = {name: p for name, p in muons.items() if id(p) in patterns}
        muons = {name: p for name, p in muons.items() if name not in gates}
    adamw_matrices = [p for name, p in matrices.items() if name not in muons and name not in gates]
    decay = {"weight_decay": config.weight_decay}
    groups = [{"params": adamw_matrices, **decay}, {"params": vectors, "weight_decay": 0.0}]
    if gates:
        groups.append({"params": list(gates.values()), **decay, "lr_scale": config.gate_lr_scale})
    adamw = _adamw(groups, config)
    if not muons:
        return adamw
    dims = _neuron_dims(model) if config.normalize_neurons else {}
    matrices_of_muon = muon_groups(muons.values(), dims)
    return MuonAndAdamW(matrices_of_muon, config.learning_rate, config.weight_decay, adamw)


def _neuron_dims(model: nn.Module) -> dict[int, int]:
    """Whether neurons are the rows (0) or the columns (1) of each FFN matrix, by its `id`."""
    dims: dict[int, int] = {}
    for ffn in (m.projections for m in model.modules() if isinstance(m, SparseFFN)):
        dims |= {id(linear.weight): 0 for linear in ffn.present}
        dims[id(ffn.down.weight)] = 1
    return dims


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
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
