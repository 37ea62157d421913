"""The mixture of experts computes what stock transformers does, and trains as the recipe says."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import set_arguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import mixture_of_experts
from moe_model import Mixture, MoEObjective, balance_loss, build_moe_optimizer, moe_config

CHANGES = ("model.intermediate_size=64", "runtime.compile=false")
MUON = ("optimizer.name=muon", "optimizer.learning_rate=1e-2", "optimizer.weight_decay=0")
MIXTURE = Mixture(experts=8, active=2)


def backward(objective):
    tokens_BT1 = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    sums = objective(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    (sums.cross_entropy_sum + sums.balance).backward()
    return tokens_BT1, sums


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_is_that_of_the_stock_model_and_balance_that_of_its_layers(tiny, autocast):
    objective = MoEObjective(tiny(*CHANGES), MIXTURE)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tokens_BT1, sums = backward(objective)
    stock = objective.model(tokens_BT1[:, :-1], output_router_logits=True)
    right = F.cross_entropy(
        stock.logits.flatten(0, 1), tokens_BT1[:, 1:].flatten(), reduction="sum"
    )
    tolerance = 1e-2 if autocast else 1e-5
    assert float(sums.cross_entropy_sum.detach()) == pytest.approx(float(right), rel=tolerance)
    config = objective.model.config
    layers = [
        load_balancing_loss_func((logits,), config.num_local_experts, config.num_experts_per_tok)
        for logits in stock.router_logits
    ]
    balance = float(sum(layers)) / len(layers)
    assert float(sums.balance.detach()) == pytest.approx(balance, rel=3 * tolerance)
    assert all(p.grad is not None and p.grad.any() for p in objective.parameters())


def test_layers_that_each_choose_one_expert_are_not_balanced():
    logits = [torch.zeros(16, 4) for _ in range(4)]
    for layer, logits_ME in enumerate(logits):
        logits_ME[:, layer] = 50.0
    chosen = [logits_ME.topk(1).indices for logits_ME in logits]
    assert float(balance_loss(logits, chosen)) == pytest.approx(4)
    # Of all layers together, every expert gets a quarter of the tokens.
    assert float(load_balancing_loss_func(tuple(logits), 4, 1)) == pytest.approx(1)


def test_fp8_is_for_attention_and_head_as_is_said(tiny, tiny_overrides, capsys):
    """On a CPU it is emulated."""
    objective = MoEObjective(tiny(*CHANGES, "runtime.precision=fp8"), MIXTURE)
    bf16 = MoEObjective(tiny(*CHANGES), MIXTURE)
    losses = []
    for each in (objective, bf16):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(backward(each)[1].cross_entropy_sum.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]
    layer = objective.model.model.layers[0]
    assert all(linear.fp8 for linear in layer.self_attn.children())
    changes = [*tiny_overrides, *CHANGES, "runtime.precision=fp8", "train.steps=1"]
    mixture_of_experts.main(["--recipe", "debug", "--experts", "8", *set_arguments(changes)])
    assert "experts in bf16, since torch" in capsys.readouterr().out
    assert all(p.grad is not None and p.grad.any() for p in objective.parameters())


def test_experts_share_the_neurons_evenly(tiny):
    assert moe_config(tiny(*CHANGES), MIXTURE).intermediate_size == 8
    for experts, active in ((7, 2), (16, 2), (8, 0), (8, 9)):
        with pytest.raises(ValueError, match="--experts"):
            moe_config(tiny(*CHANGES), Mixture(experts, active))


@pytest.mark.parametrize("gates_by_muon", [False, True])
def test_muon_orthogonalises_the_matrices_of_each_expert(tiny, gates_by_muon):
    changes = ("optimizer.gate_optimizer=muon",) if gates_by_muon else ()
    objective = MoEObjective(tiny(*CHANGES, *MUON, *changes), MIXTURE)
    optimizer, matrices = build_moe_optimizer(objective, tiny(*CHANGES, *MUON, *changes), MIXTURE)
    backward(objective)
    gate_up = objective.model.model.layers[1].mlp.experts.gate_up_proj
    before, gradient = gate_up.detach().clone(), gate_up.grad.clone()
    matrices.take_gradients()
    optimizer.step()
    for rows, by_muon in ((slice(0, 8), gates_by_muon), (slice(8, 16), True)):
        alone = torch.nn.Parameter(before[3, rows].clone())
        alone.grad = gradient[3, rows]
        torch.optim.Muon([alone], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        close = torch.allclose(gate_up[3, rows], alone, rtol=0, atol=2e-5)
        assert close == by_muon, rows
    assert not torch.equal(gate_up[:, :8], before[:, :8])


def test_the_neurons_of_each_expert_are_normalized(tiny):
    recipe = tiny(*CHANGES, *MUON, "optimizer.normalize_neurons=true")
    objective = MoEObjective(recipe, MIXTURE)
    optimizer, matrices = build_moe_optimizer(objective, recipe, MIXTURE)
    experts = objective.model.model.layers[1].mlp.experts
    before = [p.detach().clone() for p in (experts.gate_up_proj, experts.down_proj)]
    backward(objective)
    matrices.take_gradients()
    optimizer.step()
    up, down = experts.gate_up_proj[3, 8:] - before[0][3, 8:], experts.down_proj[3] - before[1][3]
    for change, other, dim in ((up, 0, 1), (down, 1, 0)):
        norms, crosswise = (change.detach().norm(dim=d) for d in (dim, other))
        torch.testing.assert_close(norms, norms.mean().expand_as(norms), rtol=1e-2, atol=0)
        assert crosswise.std() > 0.05 * crosswise.mean()


def test_gates_and_routers_have_rates_of_their_own(tiny):
    recipe = tiny(*CHANGES, *MUON, "optimizer.gate_learning_rate=5e-3")
    for mixture, of_router in ((MIXTURE, 0.5), (MIXTURE._replace(router_learning_rate=1e-3), 0.1)):
        objective = MoEObjective(recipe, mixture)
        optimizer, matrices = build_moe_optimizer(objective, recipe, mixture)
        groups = optimizer.param_groups
        scales = {id(p): group.get("lr_scale", 1.0) for group in groups for p in group["params"]}
        router = objective.model.model.layers[0].mlp.gate.weight
        assert (scales[id(matrices.gates[0])], scales[id(router)]) == (0.5, of_router)
        assert scales[id(objective.model.model.embed_tokens.weight)] == 1.0
        sizes = sum(p.numel() for group in groups for p in group["params"])
        assert sizes == sum(p.numel() for p in objective.parameters())


def test_a_micro_batch_without_a_size_is_refused(tiny):
    with pytest.raises(ValueError, match=r"train\.micro_batch_size"):
        mixture_of_experts.train(tiny(*CHANGES, "train.micro_batch_size=auto"), MIXTURE)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_seed_is_trained_and_recorded(tiny_overrides, tmp_path, optimizer):
    record = tmp_path / "results.jsonl"
    changes = [*tiny_overrides, *CHANGES, f"optimizer.name={optimizer}", "validation.every_steps=2"]
    words = ["--recipe", "debug", "--experts", "8", "--active", "2", "--seeds", "0", "1"]
    mixture_of_experts.main([*words, "--record", str(record), *set_arguments(changes)])
    lines = list(map(json.loads, record.read_text().splitlines()))
    assert {(line["case"]["seed"], line["case"]["step"], line["metric"]) for line in lines} == {
        (seed, step, metric)
        for seed in (0, 1)
        for step in (2, 4)
        for metric in ("validation_loss", "gpu_seconds", "busiest_share")
    }
    case = lines[-1]["case"]
    name = "moe-2-of-8-muon-0.003-gates-0.000375-seed1"
    assert case["run"] == (name if optimizer == "muon" else "moe-2-of-8-0.003-seed1")
    values = {(line["metric"], line["case"]["step"]): line["value"] for line in lines}
    assert values["validation_loss", 4] < values["validation_loss", 2] < 6.0
    assert 0.25 <= values["busiest_share", 4] <= 1.0  # 2 of 8 if all are chosen equally often
    assert lines[0]["bench"] == "sweep_fair-small"
