"""`runtime.precision: fp8` in training; a CPU computes the same numbers."""

import shutil

import pytest
import torch

from sparsellm.ffn.shared_linear import SharedLinear
from training.gradient_worker import accumulated_gradients

FP8 = ["runtime.precision=fp8", "model.hidden_size=32", "model.intermediate_size=96"]


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_come_near_to_those_of_bf16(tiny, kernels, tied):
    def look(run):
        model = run.model
        layers.append(
            [m for m in model.modules() if isinstance(m, SharedLinear) and m.fp8 and m.ready]
        )
        assert model.lm_head in run.sharing
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    layers = []
    settings = [*FP8, f"ffn.kernels={kernels}", f"model.tie_word_embeddings={tied}"]
    recipe = tiny("validation.every_steps=0", *settings)
    gradients = accumulated_gradients(recipe, look)
    usual = accumulated_gradients(
        tiny("validation.every_steps=0", *settings, "runtime.precision=bf16")
    )
    # Two layers of four matrices of attention and, if it is dense, three of the FFN; the head.
    assert {len(layers_of_block) for layers_of_block in layers} == {15 if kernels == "dense" else 9}
    assert [m.fp8_gradient for m in layers[0]].count(False) == 1  # the head
    assert gradients.keys() == usual.keys()
    for name, gradient in usual.items():
        off = (gradients[name] - gradient).norm() / gradient.norm()
        assert 0 < off < 0.25, name


def test_a_head_of_any_vocabulary_trains(tiny):
    heads, odd = [], ["model.vocab_multiple=1", "validation.every_steps=0"]
    gradients = accumulated_gradients(tiny(*FP8, *odd), lambda run: heads.append(run.model.lm_head))
    assert type(heads[0]) is torch.nn.Linear
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits(train):
    overrides = [*FP8, "train.steps=6", "checkpoint.every_steps=3"]
    done = train(*overrides)
    straight = done.losses()
    shutil.rmtree(done.checkpoint(6))
    resumed = train(*overrides)
    assert "resuming from" in resumed.stdout
    assert resumed.losses() == straight
