"""Linear layers around accelerated FFNs in FP8, in plain torch; tests/gpu has the GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F

import sparsellm
from ffn.small_models import small_model
from sparsellm.ffn.quantised import dequantised, rows_in_e4m3

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def model():
    return small_model()


def _in_e4m3(x, weight):
    return dequantised(rows_in_e4m3(x)) @ dequantised(rows_in_e4m3(weight)).t()


def test_attention_and_the_logits_are_computed_in_fp8_whose_few_tokens_are_exact(model):
    layer = model.get_submodule(LAYER)
    x = torch.randn(2, 65, 64).bfloat16()
    exact = F.linear(x, layer.weight)
    done = sparsellm.accelerate(model, precision="fp8")
    attention = [f"model.layers.{i}.self_attn.{k}_proj" for i in range(2) for k in "qkvo"]
    assert sorted(done.linears) == sorted([*attention, "lm_head"])
    assert str(done).startswith("2 FFNs accelerated and 9 linear layers in FP8")
    with torch.no_grad():
        expected = _in_e4m3(x.flatten(0, 1), layer.weight).view_as(exact)
        torch.testing.assert_close(layer(x).float(), expected, rtol=2**-8, atol=1e-4)
        assert not torch.equal(layer(x), exact)
        few = x[0, :64]
        expected = few.float() @ dequantised(rows_in_e4m3(layer.weight)).t()
        torch.testing.assert_close(layer(few).float(), expected, rtol=2**-8, atol=1e-4)
    assert torch.equal(layer(x), exact)  # with a gradient
    sparsellm.restore(model)
    assert torch.equal(layer(x), exact)
    assert not layer._buffers


def test_a_layer_follows_its_weight_and_a_copy_computes_with_its_own(model):
    sparsellm.accelerate(model, precision="fp8")
    layer, x = model.get_submodule(LAYER), torch.randn(80, 64).bfloat16()
    with torch.no_grad():
        other = copy.deepcopy(model).get_submodule(LAYER)
        before = layer(x)
        layer.weight.mul_(-1)
        assert torch.equal(layer(x), -before)
        assert torch.equal(other(x), before)
        other.weight.mul_(-2)
        assert torch.equal(other(x), -2 * before)


def test_a_model_that_is_made_fp32_computes_in_fp32(model):
    sparsellm.accelerate(model, precision="fp8")
    model.float()
    layer, x = model.get_submodule(LAYER), torch.randn(80, 64)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.parametrize("num_tokens", [64, 65])
def test_autocast_does_not_round_weights_in_e4m3(model, num_tokens):
    sparsellm.accelerate(model, precision="fp8")
    layer = model.get_submodule(LAYER)
    x = torch.randn(num_tokens, 64).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), expected)


def test_a_compiled_layer_computes_the_same(model):
    sparsellm.accelerate(model, precision="fp8")
    layer = model.get_submodule(LAYER)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for num_tokens in (64, 65, 130):
            x = torch.randn(num_tokens, 64).bfloat16()
            torch.testing.assert_close(compiled(x), layer(x))


def test_what_fp8_cannot_compute_stays_as_it_is(model):
    model.lm_head = torch.nn.Linear(64, 120, bias=False).bfloat16()  # not a multiple of 16
    names = set(model.state_dict())
    done = sparsellm.accelerate(model, precision="fp8")
    assert "lm_head" not in done.linears
    assert set(model.state_dict()) == names
    assert not sparsellm.accelerate(model).linears  # in the model's own type
    assert not model.get_submodule(LAYER)._buffers
