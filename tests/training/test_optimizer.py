"""Decay groups, Muon beside AdamW, refused updates, and targeted re-initialisation."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from warm import ranks

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.model import build_model
from sparsellm.processes.signals import StopRequest
from sparsellm.runs import checkpoint
from sparsellm.runs.state import optimizer_tensors
from sparsellm.training.optimization import muon
from sparsellm.training.optimization.optimizer import build_optimizer, reinit_dead_neurons
from sparsellm.training.resume.resumable import check_resumable
from sparsellm.training.step import train_step
from training import muon_worker


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_is_on_matrices_only(tiny, name):
    recipe = tiny(f"optimizer.name={name}")
    model = build_model(recipe, eos_token_id=256)
    groups = build_optimizer(model, recipe).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        assert ("norm" in parameter_name) == (parameter.dim() < 2)
        expected = recipe.optimizer.weight_decay if parameter.dim() == 2 else 0
        assert decays[id(parameter)] == expected, parameter_name
    assert all(group["fused"] for group in groups if "betas" in group)


def _step(model, optimizer, refused=0.0, spoilt=1.0):
    """An update by the gradient of some text."""
    tokens = torch.arange(32).reshape(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for parameter in model.parameters():
        parameter.grad *= spoilt
    optimizer.found_inf = torch.tensor(refused)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("l1", "gated", "choice", "patterns_of_adamw"),
    [
        (0, True, "null", "gate_proj"),
        (1e-3, True, "null", "gate_proj"),
        (0, False, "null", None),
        (1e-3, False, "null", "up_proj"),
        (0, False, "adamw", "up_proj"),
        (0, True, "muon", None),
        (1e-3, True, "muon", None),
    ],
)
def test_muon_has_the_matrices_of_the_blocks_and_steps_as_long_as_adamw(
    tiny, l1, gated, choice, patterns_of_adamw
):
    overrides = [f"sparsity.l1_coefficient={l1}", f"ffn.gated={gated}"]
    overrides.append(f"optimizer.gate_optimizer={choice}")
    recipe = tiny("optimizer.name=muon", "optimizer.weight_decay=0", *overrides)
    model = build_model(recipe, eos_token_id=256)
    optimizer = build_optimizer(model, recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _step(model, optimizer)
    for name, parameter in model.named_parameters():
        block = parameter.dim() == 2 and ".layers." in name
        block &= patterns_of_adamw is None or patterns_of_adamw not in name
        assert ("momentum_buffer" in optimizer.state[parameter]) == block
        assert ("exp_avg" in optimizer.state[parameter]) != block
        if block:
            length = (parameter - before[name]).pow(
                2
            ).mean().sqrt() / recipe.optimizer.learning_rate
            assert 0.1 < float(length) < 0.3, name  # AdamW's is 0.2 to 0.4 in training


@pytest.mark.parametrize(
    ("gated", "pattern", "rate", "part"),
    [(True, "gate_proj", "1e-3", 4), (False, "up_proj", "null", 8)],
)
def test_gates_beside_muon_have_their_own_learning_rate_over_the_schedule(
    build, gated, pattern, rate, part
):
    overrides = ["optimizer.learning_rate=4e-3", f"optimizer.gate_learning_rate={rate}"]
    overrides += ["optimizer.weight_decay=0", f"ffn.gated={gated}", "runtime.compile=false"]
    run = build("optimizer.name=muon", *overrides)
    names = {id(p): name for name, p in run.model.named_parameters()}
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    rates, first = [], {}
    for _ in range(run.recipe.train.steps):
        rates.append(train_step(run, StopRequest()).values["learning_rate"])
        for group in run.optimizer.param_groups:
            for parameter in group["params"]:
                gate = pattern in names[id(parameter)]
                assert group["lr"] == pytest.approx(rates[-1] / (part if gate else 1))
        first = first or {
            name: float((p - before[name]).abs().max())
            for name, p in run.model.named_parameters()
            if "exp_avg" in run.optimizer.state[p]
        }
    assert rates == pytest.approx([2e-3, 4e-3, 4e-3, 2e-3])  # warm-up and cosine
    for name, most in first.items():  # of AdamW's first step, which is as long as the rate
        assert most == pytest.approx(2e-3 / part if pattern in name else 2e-3, rel=1e-2), name
    assert sum(pattern in name for name in first) == run.recipe.model.num_hidden_layers


def test_muon_computes_what_torch_does():
    muon_worker.check(torch.clone, "one process")


def test_normalized_neurons_are_those_of_torchs_update():
    muon_worker.check_normalized(torch.clone, "one process")


def test_muon_does_not_transpose_tall_matrices():
    [group] = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups
    wide = torch.randn(2, 48, 80).bfloat16()
    updates = muon._orthogonal(wide.mT.contiguous(), group)
    assert updates.is_contiguous()
    torch.testing.assert_close(updates, muon._orthogonal(wide, group).mT, rtol=0, atol=0.02)


@pytest.mark.parametrize("strips", [1, 2, 4])
def test_products_of_strips_are_those_of_whole_matrices(monkeypatch, strips):
    monkeypatch.setattr(muon, "STRIPS", strips)
    monkeypatch.setattr(muon, "SYMMETRIC_NUMEL", 0)
    for x in (torch.randn(3, 64, 96), torch.randn(2, 80, 32).mT, torch.randn(1, 60, 7)):
        gram = muon._times_own_transpose(x.double())
        torch.testing.assert_close(gram, x.double() @ x.double().mT)
        sums = muon._times_own_transpose(gram, gram, beta=-0.5, alpha=2.0)
        torch.testing.assert_close(sums, 2 * gram @ gram - 0.5 * gram)


@pytest.mark.slow
def test_ranks_that_divide_muons_matrices_compute_what_one_does():
    ranks(4, muon_worker.__file__, "cpu")


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("first", [True, False])
def test_a_refused_update_changes_nothing(tiny, name, first):
    recipe = tiny(f"optimizer.name={name}")
    models = [build_model(recipe, eos_token_id=256) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build_optimizer(model, recipe) for model in models]
    if not first:
        for model, optimizer in zip(models, optimizers, strict=True):
            _step(model, optimizer)
    _step(models[0], optimizers[0], refused=1.0, spoilt=math.nan)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    for model, optimizer in zip(models, optimizers, strict=True):
        _step(model, optimizer)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    tensors = [optimizer_tensors(*pair) for pair in zip(models, optimizers, strict=True)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())


def test_muon_resumes_to_the_same_bits_and_not_as_adamw(train):
    muon = ["optimizer.name=muon", "optimizer.min_lr_ratio=1", "runtime.compile=false"]
    own_rate = [*muon, "optimizer.gate_learning_rate=1e-4"]
    straight = train(*own_rate, "name=straight")
    train(*own_rate, "train.steps=2")
    resumed = train(*own_rate)
    assert "resuming from" in resumed.stdout
    for kind in ("model", "optimizer"):
        whole, halves = (
            checkpoint.read_kind(done.checkpoint(4), kind) for done in (straight, resumed)
        )
        assert whole.keys() == halves.keys()
        assert all(torch.equal(tensor, halves[key]) for key, tensor in whole.items())
    other = train(*muon, "train.steps=6", "optimizer.name=adamw", status=1)
    assert "has the state of optimizer.name muon, not adamw: resume with --set" in other.stderr
    other = train(*muon, "train.steps=6", "optimizer.gate_optimizer=muon", status=1)
    assert "resume with --set optimizer.gate_optimizer=adamw" in other.stderr
    done = train(*own_rate, "train.steps=6", "optimizer.normalize_neurons=true")
    assert "changed since the checkpoint: optimizer.normalize_neurons false → true" in done.stdout


@pytest.mark.parametrize(
    ("gated_and_l1", "gate_optimizer", "before"),
    [
        ((True, 0), "null", "adamw"),
        ((True, 1e-3), "null", "adamw"),
        ((False, 0), "null", "muon"),
        ((True, 1e-3), "muon", "muon"),
    ],
)
def test_a_run_goes_on_with_the_optimizer_that_its_gates_had(
    tiny, tmp_path, gated_and_l1, gate_optimizer, before
):
    gated, l1 = gated_and_l1
    overrides = ["optimizer.name=muon", f"ffn.gated={gated}", f"sparsity.l1_coefficient={l1}"]
    saved = tiny(*overrides, f"optimizer.gate_optimizer={gate_optimizer}")
    (tmp_path / "recipe.yaml").write_text(saved.to_yaml())
    check_resumable(tmp_path, tiny(*overrides, f"optimizer.gate_optimizer={before}"))
    other = {"muon": "adamw", "adamw": "muon"}[before]
    remedy = f"gates that {before} updated, not {other}: resume .*gate_optimizer={before},"
    with pytest.raises(ValueError, match=remedy):
        check_resumable(tmp_path, tiny(*overrides, f"optimizer.gate_optimizer={other}"))


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


@pytest.fixture
def second_of_two_ranks():
    """A group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_reinit_of_a_shard_is_that_of_its_rows(second_of_two_ranks):
    whole, sharded = (SparseFFN(8, 16, gated=True) for _ in range(2))
    weight_NK = whole.gate_proj.weight.detach().clone()
    shard = DTensor.from_local(weight_NK[8:].clone(), second_of_two_ranks, [Shard(0)])
    sharded.gate_proj.weight = torch.nn.Parameter(shard)
    dead_LN = torch.arange(16)[None] % 3 == 0
    for ffn in (whole, sharded):
        reinit_dead_neurons([ffn], dead_LN, rate=0.1, std=0.02, seed=3, step=7)
    changed = sharded.gate_proj.weight.to_local()
    assert torch.equal(changed, whole.gate_proj.weight[8:])
    assert not torch.equal(changed, weight_NK[8:])


def test_reinit_takes_any_seed():
    ffns = [SparseFFN(8, 16, gated=True)]
    dead_LN = torch.ones(1, 16, dtype=torch.bool)
    reinit_dead_neurons(ffns, dead_LN, rate=0.1, std=0.02, seed=2**40, step=10**6)
