"""Decay groups and targeted re-initialisation."""

from __future__ import annotations

import torch

from sparsellm.ffn.module import SparseFFN
from sparsellm.model import build_model
from sparsellm.training.optimizer import build_optimizer, reinit_dead_neurons


def test_decay_is_on_matrices_only(tiny):
    recipe = tiny()
    model = build_model(recipe, eos_token_id=256)
    decayed, plain = build_optimizer(model, recipe.optimizer).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == recipe.optimizer.weight_decay
    assert plain["weight_decay"] == 0
    assert all("norm" in names[id(p)] for p in plain["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    assert decayed["fused"]


def test_reinit_moves_the_gate_rows_of_dead_neurons_alone(tiny):
    recipe = tiny("model.hidden_size=256", "model.intermediate_size=512")
    model = build_model(recipe, eos_token_id=256)
    ffns = [layer.mlp for layer in model.model.layers]
    before = [ffn.gate_proj.weight.detach().clone() for ffn in ffns]
    up = ffns[0].up_proj.weight.detach().clone()
    dead_LN = torch.zeros(2, 512, dtype=torch.bool)
    dead_LN[1, 100:400] = True

    def reinit(step):
        reinit_dead_neurons(ffns, dead_LN, rate=0.1, std=0.02, seed=3, step=step)
        return ffns[1].gate_proj.weight.detach().clone()

    first = reinit(step=7)
    assert torch.equal(ffns[0].gate_proj.weight, before[0])
    assert torch.equal(ffns[0].up_proj.weight, up)
    alive = ~dead_LN[1]
    assert torch.equal(first[alive], before[1][alive])
    # W ← 0.9 W + 0.1 N(0, 0.02²): what was added has that mean and deviation.
    noise = (first - 0.9 * before[1])[dead_LN[1]] / 0.1
    assert abs(float(noise.mean())) < 1e-3
    assert abs(float(noise.std()) - 0.02) < 1e-3

    with torch.no_grad():
        ffns[1].gate_proj.weight.copy_(before[1])
    assert torch.equal(reinit(step=7), first)  # a resumed run repeats it
    with torch.no_grad():
        ffns[1].gate_proj.weight.copy_(before[1])
    assert not torch.equal(reinit(step=8), first)


def test_reinit_takes_any_seed():
    ffns = [SparseFFN(8, 16, gated=True)]
    dead_LN = torch.ones(1, 16, dtype=torch.bool)
    reinit_dead_neurons(ffns, dead_LN, rate=0.1, std=0.02, seed=2**40, step=10**6)
