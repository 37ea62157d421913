"""`runtime.weight_gradients: fused` changes how gradients are added up, and not what they are."""

import functools
import shutil

import pytest
import torch

from sparsellm.ffn.shared_linear import SharedLinear, shared_linears
from training.gradient_worker import accumulated_gradients

FUSED = "runtime.weight_gradients=fused"


@pytest.fixture
def gradients(tiny):
    """By parameter, of a step of four micro-batches."""

    def compute(*overrides):
        shared = []

        def count(run):
            runs.append(run)
            ready = [part for part in run.model.modules() if _shares(part)]
            shared.append((len(ready), sum(part.sum_NK is not None for part in ready)))

        recipe, runs = tiny("validation.every_steps=0", *overrides), []
        tensors = accumulated_gradients(recipe, count)
        assert not any(map(_shares, runs[0].model.modules()))
        return tensors, shared

    return compute


def _shares(module):
    return isinstance(module, SharedLinear) and module.ready is not None


@pytest.mark.parametrize(
    ("kernels", "recomputed", "compiled"),
    [
        ("dense", False, False),
        ("dense", True, True),
        ("sparse", True, False),
        ("sparse", False, True),
    ],
)
def test_gradients_are_those_of_autograd(gradients, kernels, recomputed, compiled, monkeypatch):
    # The graphs that are compiled; machine code for them takes seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    settings = [f"ffn.kernels={kernels}", f"runtime.activation_checkpointing={recomputed}"]
    expected, shared = gradients(*settings)
    assert shared == 4 * [(0, 0)]
    actual, shared = gradients(*settings, f"runtime.compile={compiled}", FUSED)
    # Two layers of four matrices of attention, and three of a dense FFN.
    count = 14 if kernels == "dense" else 8
    assert shared == [*3 * [(count, count)], (count, 0)]
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


def test_under_autocast_they_differ_by_the_rounding_of_bf16(gradients):
    bf16 = "runtime.precision=bf16"
    (usual, _), (actual, _) = gradients(bf16), gradients(bf16, FUSED)
    for name, gradient in usual.items():
        difference = (actual[name] - gradient).norm() / gradient.norm()
        assert difference < 0.01, name
        assert (difference > 0) == ("_proj" in name), name  # nothing else is computed otherwise


def test_a_micro_batch_that_is_the_whole_step_has_the_same_gradients(gradients):
    whole = ["train.micro_batch_size=8", "runtime.precision=bf16"]
    expected, _ = gradients(*whole)
    actual, shared = gradients(*whole, FUSED)
    assert shared == [(14, 0)]
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


def test_linear_layers_are_left_alone_by_default(build):
    run = build("validation.every_steps=0")
    assert run.sharing == run.ffns
    assert not any(shared_linears(layer.self_attn) for layer in run.model.model.layers)


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_has_the_losses_of_autograd(train):
    common = ["train.steps=8", "checkpoint.every_steps=4"]
    common += ["sparsity.reinit_rate=0.1", "validation.every_steps=3"]
    done = train(*common, FUSED)
    straight = done.losses()
    assert len(straight) == 8 + 3
    shutil.rmtree(done.checkpoint(8))  # as if it had been killed before
    resumed = train(*common, FUSED)
    assert "resuming from" in resumed.stdout
    assert resumed.losses() == straight
    for overrides in (["name=usual"], [FUSED, "train.micro_batch_size=auto", "name=auto"]):
        assert train(*common, *overrides).losses() == pytest.approx(straight, rel=1e-5)
