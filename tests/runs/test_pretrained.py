"""Loading a trained model for use."""

import pytest
import torch
from conftest import save_run

from sparsellm.processes.signals import StopRequest
from sparsellm.runs import checkpoint, state
from sparsellm.runs.huggingface import pretrained as loading
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.pretrained import load_pretrained
from sparsellm.training.step import train_step


@pytest.fixture
def run(build):
    run = build()
    train_step(run, StopRequest())
    return run


def test_a_run_a_folder_and_a_checkpoint_mean_the_same(run):
    path = save_run(run)
    for place in (path, run.checkpoints, run.recipe.run_path):
        assert find_checkpoint(place) == path
    loaded = load_pretrained(run.recipe.run_path)
    assert loaded.recipe == run.recipe
    assert loaded.trainer["step"] == 1
    assert not loaded.model.training
    for name, value in state.gather_model(run.model).items():
        assert torch.equal(dict(loaded.model.named_parameters())[name], value)


def test_bf16_rounds_the_weights_and_nothing_else(run):
    save_run(run)
    model = load_pretrained(run.recipe.run_path, dtype=torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # Rounded to bf16, RoPE's frequencies would turn distant positions by whole radians.
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_mistakes_name_the_file(run, tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint .* one such as runs/debug"):
        find_checkpoint(tmp_path / "nowhere")
    path = save_run(run)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_pretrained(path)
    weights.write_bytes(whole)
    run.recipe = tiny("model.intermediate_size=96")
    save_run(run)
    with pytest.raises(ValueError, match=r"model\.safetensors.*has shape"):
        load_pretrained(path)


@pytest.mark.parametrize("read", ["verify", "read_trainer", "read_kind"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_looked_for_again(run, monkeypatch, read):
    """As by a run that trains with checkpoint.keep 1 and saves meanwhile."""
    first = save_run(run)
    module = loading if read == "verify" else checkpoint
    real = getattr(module, read)

    def late(path, *arguments):
        if path == first:
            train_step(run, StopRequest())
            save_run(run)
            assert not first.exists()
        return real(path, *arguments)

    run.saver._keep = 1
    monkeypatch.setattr(module, read, late)
    loaded = load_pretrained(run.recipe.run_path)
    assert loaded.path == first.with_name("step_00000002")
    assert loaded.trainer["step"] == 2
    for name, value in state.gather_model(run.model).items():
        assert torch.equal(dict(loaded.model.named_parameters())[name], value)


def test_a_checkpoint_that_is_damaged_is_not_looked_for_again(run, tmp_path):
    path = save_run(run)
    (path / "trainer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"step_00000001/trainer.json is missing"):
        load_pretrained(run.recipe.run_path)
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint"):
        load_pretrained(tmp_path / "step_00000001")
