"""SiLU → ReLU: the ramp of the activation and the teacher, each against its formula."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, train_recipe
from runs.hf_models import stock_model, write_model
from safetensors.torch import load_file
from torch import nn

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import Ramp
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.recipe.estimate import executed_flops_per_token, train_flops_per_token
from sparsellm.runs import checkpoint
from sparsellm.runs.huggingface.recipe_of import recipe_for
from sparsellm.runs.state import tensors_digest
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.training.objective import LossSums, distillation_losses, total_loss
from sparsellm.training.resume.run_state import initialise_run
from sparsellm.training.step import train_step
from sparsellm.training.teacher import load_teacher

SILU = ["ffn.activation=silu", "sparsity.l1_coefficient=0", "name=dense"]
RAMP = ["name=sparse", "ffn.ramp_steps=2", "sparsity.l1_coefficient=0.01"]
DISTILLED = [*RAMP, "train.distillation=0.5"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A run that was trained with SiLU."""
    runs = tmp_path_factory.mktemp("relufy")
    recipe = load_recipe("debug", [*TINY, *SILU, f"logging.run_dir={runs}"])
    train_recipe(recipe)
    return recipe.run_path


def _losses(path):
    return [line["loss"] for line in read_metrics(path, "train")]


@pytest.mark.parametrize("gated", [True, False])
def test_a_ramp_mixes_the_output_and_counts_what_remains(gated):
    torch.manual_seed(0)
    ffn = SparseFFN(16, 32, gated=gated).double()
    x_MK = torch.randn(64, 16, dtype=torch.float64)
    ffn.use_ramp(Ramp("silu", torch.tensor(0.25)))
    y_MK, stats = ffn.forward_with_stats(x_MK)
    z_MN = F.linear(x_MK, ffn.pattern_weight)
    up_MN = ffn.up_proj(x_MK) if gated else 1
    mixed_MN = 0.75 * F.silu(z_MN) + 0.25 * F.relu(z_MN)
    torch.testing.assert_close(y_MK, ffn.down_proj(mixed_MN * up_MN))
    torch.testing.assert_close(stats.l1_sum, (F.relu(z_MN) * up_MN).abs().sum())
    assert stats.nnz_M.equal((z_MN > 0).sum(1).int())
    alone = ffn.eval()(x_MK)
    ffn.use_ramp(None)
    assert ffn.train()(x_MK).equal(alone)
    torch.testing.assert_close(alone, ffn.down_proj(F.relu(z_MN) * up_MN))


def test_kernels_are_dense_while_the_ramp_lasts():
    ffn = SparseFFN(16, 32, gated=True, kernels="sparse")
    ffn.use_ramp(Ramp("silu", torch.tensor(0.25)))
    assert ffn.capacity_for(64) is None
    ffn.use_ramp(None)
    assert ffn.capacity_for(64) is not None


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_a_ramp_begins_with_the_old_activation_and_ends_with_the_new(tiny, dense, kernels):
    recipe = tiny(*RAMP, "checkpoint.every_steps=0", f"ffn.kernels={kernels}")
    train_recipe(recipe)
    assert _losses(recipe.run_path)[0] == _losses(dense)[0]
    records = read_metrics(recipe.run_path, "train")
    paths = [line["kernels"]["sparse"] for line in records]
    assert paths == [[False] * 2] * 2 + [[kernels == "sparse"] * 2] * 2
    assert all(max(line["sparsity"]["nnz_mean"]) < 60 for line in records)  # of 64, ReLU's


def test_the_divergence_has_its_gradient():
    torch.manual_seed(0)
    x_MC = torch.randn(6, 8, requires_grad=True)
    head = nn.Linear(8, 11, bias=False)
    w_VC = head.weight
    teacher_MV, targets_M = torch.randn(6, 11), torch.arange(6)
    cross_entropy, divergence = distillation_losses(
        nn.Identity(), x_MC, head, targets_M, teacher_MV
    )
    p_MV, q_MV = (x_MC @ w_VC.T).softmax(1), teacher_MV.softmax(1)
    torch.testing.assert_close(divergence, (q_MV * (q_MV.log() - p_MV.log())).sum())
    torch.testing.assert_close(cross_entropy, -p_MV.log()[range(6), targets_M].sum())
    none = torch.zeros(0)
    sums = LossSums(cross_entropy, torch.zeros(1), none, none, none, divergence_sum=divergence)
    total_loss(sums, 0.0, 12, 2, distillation=0.25).backward()
    one_hot_MV = F.one_hot(targets_M, 11)
    d_logits_MV = (0.75 * (p_MV - one_hot_MV) + 0.25 * (p_MV - q_MV)).detach() * 2 / 12
    torch.testing.assert_close(x_MC.grad, d_logits_MV @ w_VC.detach())
    torch.testing.assert_close(w_VC.grad, d_logits_MV.T @ x_MC.detach())


def test_the_teacher_is_the_original_and_neither_trained_nor_saved(tiny, build, dense):
    overrides = [*DISTILLED, "train.distillation=1", "sparsity.l1_coefficient=0"]
    last = train_recipe(tiny(*overrides), init_from=dense)
    original = load_file(dense / "checkpoints" / "step_00000004" / "model.safetensors")
    tensors = load_file(last / "model.safetensors")
    assert tensors.keys() == original.keys()
    run = build(*overrides)
    run.teacher = load_teacher(run.recipe, run.accelerator.device, last, None)
    trained_ids = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert trained_ids.isdisjoint(map(id, run.teacher._model.parameters()))
    initialise_run(run, dense)
    # The same weights and activation: nothing to learn, and no gradient.
    totals = train_step(run, StopRequest())
    assert totals.reading.gradient_norm < 1e-5
    teacher = json.loads((last / "trainer.json").read_text())["teacher"]
    path = str((dense / "checkpoints" / "step_00000004").resolve())
    digest = teacher.pop("weights")
    assert len(digest) == 32
    assert digest == tensors_digest(checkpoint.read_kind(Path(path), "model"))
    assert teacher == {"path": path, "name": "dense", "step": 4, "tokens": 1024}


def test_the_digest_of_weights_is_that_of_names_types_and_bytes():
    weights = {"b": torch.arange(6.0).view(2, 3), "a": torch.zeros((), dtype=torch.bfloat16)}
    digest = tensors_digest(weights)
    assert digest == tensors_digest(dict(reversed(weights.items())))
    assert digest == tensors_digest(weights | {"b": weights["b"].T.contiguous().T})
    for name, tensor in {
        "b": weights["b"].view(3, 2),
        "c": weights["b"],
        "a": torch.tensor(-0.0, dtype=torch.bfloat16),
    }.items():
        assert digest != tensors_digest(weights | {name: tensor})
    assert digest != tensors_digest(weights | {"a": weights["a"].half()})


@pytest.mark.parametrize("name", ["Llama 3", "Mistral 0.1", "Qwen2", "Qwen3", "SmolLM3", "Arcee"])
def test_the_teacher_of_any_family_gives_its_own_logits(name, tmp_path):
    stock = stock_model(name)
    folder = write_model(stock, tmp_path / "model")
    overrides = [*TINY, "model.context_length=16", "train.distillation=0.5"]
    remaining = [o for o in overrides if not o.startswith("model.") or "context" in o]
    recipe = recipe_for("debug", remaining, folder)
    teacher = load_teacher(recipe, torch.device("cpu"), None, folder)
    tokens_BT = torch.arange(32).view(2, 16)
    logits_BTV = teacher.logits(tokens_BT)[..., : stock.config.vocab_size]
    torch.testing.assert_close(logits_BTV, stock(tokens_BT).logits, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_distils_and_ramps_to_the_same_bits(tiny, dense):
    steps = ["train.steps=4", "checkpoint.every_steps=1", "ffn.ramp_steps=3"]
    recipe = tiny(*DISTILLED, *steps)
    last = train_recipe(recipe, init_from=dense)
    whole, losses = load_file(last / "model.safetensors"), _losses(recipe.run_path)
    for step in (3, 4):
        shutil.rmtree(last.with_name(f"step_{step:08d}"))
    (last.parent / "latest").write_text("step_00000002")
    train_recipe(recipe)
    assert _losses(recipe.run_path) == losses
    again = load_file(last / "model.safetensors")
    assert all(again[name].equal(tensor) for name, tensor in whole.items())


def test_a_teacher_that_cannot_be_had_is_named(tiny, dense, tmp_path):
    recipe = tiny(*DISTILLED, "train.steps=2")
    folder = tmp_path / "there"
    with pytest.raises(ValueError, match=r"teacher is the model .* give it with --init-from"):
        train_recipe(recipe)
    last = train_recipe(recipe, init_from=shutil.copytree(dense, folder))
    moved, cpu = folder.rename(tmp_path / "elsewhere"), torch.device("cpu")
    with pytest.raises(FileNotFoundError, match=r"needs its teacher: .*moved, give its new place"):
        load_teacher(recipe, cpu, last, None)
    earlier = moved / "checkpoints" / "step_00000002"
    with pytest.raises(ValueError, match=r"other weights than this run's teacher \(dense, step 4"):
        load_teacher(recipe, cpu, last, earlier)
    assert load_teacher(recipe, cpu, last, moved).name["path"].startswith(str(moved))
    retrained = tiny(*SILU, "name=dense", "seed=7", f"logging.run_dir={tmp_path}")
    assert train_recipe(retrained).name == "step_00000004"  # the same name, step and tokens
    with pytest.raises(ValueError, match=r"other weights than this run's teacher \(dense, step 4"):
        load_teacher(recipe, cpu, last, retrained.run_path)
    other = tiny(*DISTILLED, "model.vocab_multiple=128")
    with pytest.raises(ValueError, match=r"tokenizer bytes and 320 logits, this run bytes and 384"):
        load_teacher(other, cpu, None, moved)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ffn.ramp_steps=5", "ffn.ramp_from=relu"], "ffn.ramp_from and ffn.activation are both"),
        (["train.distillation=0.5", "runtime.loss=liger"], "runtime.loss: liger never has"),
        (["ffn.ramp_from=gelu"], "ffn.ramp_from"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tiny, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny(*overrides)


def test_the_teachers_forward_pass_counts(tiny):
    alone, taught = tiny(), tiny("train.distillation=0.5")
    forward = train_flops_per_token(alone) / 3
    more = executed_flops_per_token(taught) - executed_flops_per_token(alone)
    assert more == pytest.approx(forward)
