"""Neuron-wise normalisation of Muon's updates: norms, dead neurons, and which matrices have it."""

import pytest
import torch

from sparsellm.model import build_model
from sparsellm.training.optimization.muon import MuonAndAdamW
from sparsellm.training.optimization.neurons import MAX_GAIN, normalize_neurons
from sparsellm.training.optimization.optimizer import build_optimizer

ROUNDING = 2**-8  # of bf16 twice, relative


def _uneven(*shape):
    """Three matrices in bf16 whose rows and columns have norms that differ up to threefold."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, *shape, generator=generator)
    rows, columns = (torch.rand(3, n, generator=generator) + 0.5 for n in shape)
    return (numbers * rows[:, :, None] * columns[:, None, :]).bfloat16()


def _part_norms(updates, dim):
    """(matrices, neurons)"""
    return torch.linalg.vector_norm(updates.double(), dim=2 - dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (64, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_get_one_norm_and_matrices_keep_theirs(shape, dim, transposed):
    updates = _uneven(*shape)
    if transposed:  # as those of matrices with more rows than columns are
        updates = updates.mT.contiguous().mT
    before = updates.clone()
    assert _part_norms(before, dim).std(1).min() > 0.1 * _part_norms(before, dim).mean()
    result = normalize_neurons(updates, dim)
    assert (result.dtype, result.shape) == (torch.bfloat16, before.shape)
    wholes = torch.linalg.vector_norm(before.double(), dim=(1, 2))
    right = (wholes / shape[dim] ** 0.5)[:, None].expand(3, shape[dim])
    torch.testing.assert_close(_part_norms(result, dim), right, rtol=ROUNDING, atol=0)
    exact = before * (right / _part_norms(before, dim)).unsqueeze(2 - dim)
    torch.testing.assert_close(result.double(), exact, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_part_of_a_dead_neuron_is_limited_and_stays_finite(dim):
    updates = _uneven(64, 64)
    rows = updates if dim == 0 else updates.mT
    rows[0, 3] = 0
    rows[0, 4] *= 1e-4
    rows[0, 5] *= 1e-30  # its square is none of fp32's numbers
    rows[1] = 0  # the whole matrix, as at a first step that is refused
    before = updates.clone()
    result = normalize_neurons(updates, dim)
    assert result.isfinite().all()
    assert not result[1].any()
    wholes = torch.linalg.vector_norm(before[0].double())
    torch.testing.assert_close(_part_norms(result, dim)[0].norm(), wholes, rtol=ROUNDING, atol=0)
    norms, earlier = _part_norms(result, dim)[0], _part_norms(before, dim)[0]
    alive = norms[[*range(3), *range(6, 64)]]
    torch.testing.assert_close(alive, alive.mean().expand(61), rtol=ROUNDING, atol=0)
    assert norms[3] == 0
    restored = (64 / 61) ** 0.5  # the norm that three neurons lack
    assert norms[4] / earlier[4] == pytest.approx(MAX_GAIN * restored, rel=1e-2)
    assert norms[5] / earlier[5] < MAX_GAIN * 1.1


def _updated(model, recipe):
    """The change of each parameter by the first step, by a gradient of random numbers."""
    optimizer = build_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        scale = torch.rand(parameter.shape[0], generator=generator) + 0.1  # rows of unlike norms
        numbers = torch.randn(parameter.shape, generator=generator)
        parameter.grad = numbers * scale.view(-1, *[1] * (parameter.dim() - 1))
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("intermediate_size", [64, 96])
@pytest.mark.parametrize(
    ("overrides", "normalized"),
    [
        (["sparsity.l1_coefficient=1e-3"], {"up_proj": 0, "down_proj": 1}),
        (["optimizer.gate_optimizer=muon"], {"gate_proj": 0, "up_proj": 0, "down_proj": 1}),
        (["ffn.gated=false", "sparsity.l1_coefficient=1e-3"], {"down_proj": 1}),
        (["ffn.gated=false", "sparsity.l1_coefficient=0"], {"up_proj": 0, "down_proj": 1}),
    ],
)
def test_neurons_are_rows_of_gate_and_up_and_columns_of_down(
    tiny, intermediate_size, overrides, normalized
):
    overrides = ["optimizer.name=muon", "optimizer.weight_decay=0", *overrides]
    overrides += ["model.hidden_size=64", f"model.intermediate_size={intermediate_size}"]
    plain, recipe = (tiny(*overrides, f"optimizer.normalize_neurons={on}") for on in (False, True))
    model = build_model(plain, eos_token_id=256)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = _updated(model, plain)
    model.load_state_dict(start, strict=False)
    for name, change in _updated(model, recipe).items():
        dim = normalized.get(name.split(".")[-2])
        if dim is None:
            assert torch.equal(change, before[name]), name
            continue
        unlike, alike = (_part_norms(c[None], dim)[0] for c in (before[name], change))
        assert unlike.std() > 0.02 * unlike.mean(), name
        torch.testing.assert_close(alike, alike.mean().expand_as(alike), rtol=ROUNDING, atol=0)
        torch.testing.assert_close(alike.norm(), unlike.norm(), rtol=1e-3, atol=0)


def test_without_the_key_muon_has_one_group_in_the_models_order(tiny):
    recipe = tiny("optimizer.name=muon")
    model = build_model(recipe, eos_token_id=256)
    optimizer = build_optimizer(model, recipe)
    assert isinstance(optimizer, MuonAndAdamW)
    muon, *adamw = optimizer.param_groups
    assert ["ns_steps" in group for group in (muon, *adamw)] == [True, False, False, False]
    in_blocks = [
        parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and "gate_proj" not in name
    ]
    assert list(map(id, muon["params"])) == list(map(id, in_blocks))
