"""The optimizer, and targeted re-initialisation of dead neurons."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsellm.ffn.module import SparseFFN
from sparsellm.recipe import Recipe
from sparsellm.recipe_sections import OptimizerConfig


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer; weight decay on matrices (embeddings included), none on norm vectors.

    Whoever sets learning rates multiplies a group's by its ``lr_scale``, if it has one. A step
    changes nothing if the optimizer's attribute ``found_inf``, a tensor (), is 1; the host does not
    wait for its value.
    """
    config = recipe.optimizer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = {name: p for name, p in named if p.dim() >= 2}
    vectors = {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}
    muons, gates = {}, {}
    if config.name == "muon":
        muons = {name: p for name, p in matrices.items() if "layers" in name.split(".")}
    if recipe.sparsity.l1_coefficient:
        # L1 pushes every gate row along the mean of x, one direction of the matrix. Muon makes the
        # update equally large in all directions: λ then has to rise until it drowns the loss.
        patterns = {id(m.pattern_weight) for m in model.modules() if isinstance(m, SparseFFN)}
        gates = {name: p for name, p in muons.items() if id(p) in patterns}
        muons = {name: p for name, p in muons.items() if name not in gates}
    others = [p for name, p in matrices.items() if name not in muons and name not in gates]
    decay = {"weight_decay": config.weight_decay}
    groups = [{"params": others, **decay}, vectors]
    if gates:
        scale = {"lr_scale": config.gate_lr_scale}
        groups.append({"params": list(gates.values()), **decay, **scale})
    if muons:
        return MuonAndAdamW(list(muons.values()), groups, config)
    return _adamw(groups, config)


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, AdamW for everything else.

    Muon's update of an (A, B) matrix is scaled by ``0.2 √max(A, B)``, to the root mean square of
    AdamW's updates. So one learning rate and one decoupled weight decay serve both.

    Args:
        matrices: that Muon updates.
        others: AdamW's groups.
        config: of the recipe.
    """

    def __init__(
        self, matrices: Sequence[Tensor], others: list[dict[str, Any]], config: OptimizerConfig
    ) -> None:
        self._muon = torch.optim.Muon(
            list(matrices),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = _adamw(others, config)
        self.found_inf: Tensor | None = None
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters, or none where ``found_inf`` is 1."""
        assert closure is None
        first, *others = self.param_groups
        # accelerate replaces groups and state, so both parts are given them at every step.
        self._muon.state = self._adamw.state = self.state
        for parameter in first["params"]:
            if parameter.grad is not None:
                self._update_matrix(parameter, first)
        self._adamw.param_groups = others
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _update_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Muon's step of one matrix, undone on the device where ``found_inf`` is 1."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        changed = [_local(parameter), _local(state["momentum_buffer"])]
        before = [tensor.clone() for tensor in changed]
        self._muon.param_groups = [group | {"params": [parameter]}]
        self._muon.step()
        if self.found_inf is not None:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(self.found_inf.bool(), old, tensor))


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
