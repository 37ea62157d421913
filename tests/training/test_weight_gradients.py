"""`runtime.weight_gradients: fused` changes how gradients are added up, and not what they are."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from conftest import set_arguments

from sparsellm.ffn.shared_linear import SharedLinear, shared_linears
from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.training.run import build_run, close_run
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


def test_linear_layers_are_left_alone_by_default(tiny):
    run = build_run(tiny("validation.every_steps=0"))
    assert run.sharing == run.ffns
    assert not any(shared_linears(layer.self_attn) for layer in run.model.model.layers)
    close_run(run)


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_has_the_losses_of_autograd(tiny_overrides, cli_here):
    common = [*tiny_overrides, "train.steps=8", "checkpoint.every_steps=4"]
    common += ["sparsity.reinit_rate=0.1", "validation.every_steps=3"]

    def train(name, *overrides):
        settings = [*common, f"name={name}", *overrides]
        done = cli_here("train", "--recipe", "debug", *set_arguments(settings))
        assert done.returncode == 0, done.stderr
        path = load_recipe("debug", settings).run_path
        return done.stdout, path, [r["loss"] for r in read_metrics(path) if "loss" in r]

    _, path, straight = train("fused", FUSED)
    assert len(straight) == 8 + 3
    shutil.rmtree(path / "checkpoints" / "step_00000008")  # as if it had been killed before
    output, _, resumed = train("fused", FUSED)
    assert "resuming from" in output
    assert resumed == straight
    for overrides in ((), (FUSED, "train.micro_batch_size=auto")):
        *_, losses = train(f"other{len(overrides)}", *overrides)
        assert losses == pytest.approx(straight, rel=1e-5)
