"""`sparsellm.accelerate` and its operator in plain torch; tests/gpu has the kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sparsellm
from sparsellm.kernels.union import pack_down, unpack_down
from sparsellm.model import build_model
from sparsellm.ops import sparse_ffn

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(2 * 20).view(2, 20) % 128


def _model(config_class, model_class, **options):
    torch.manual_seed(0)
    options = {"hidden_act": "relu", **options}
    return model_class(config_class(**SHAPE, **options)).bfloat16().eval()


FAMILIES = [
    (LlamaConfig, LlamaForCausalLM, {}),
    (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}),
    (MistralConfig, MistralForCausalLM, {}),
    (Qwen3Config, Qwen3ForCausalLM, {}),
    (ArceeConfig, ArceeForCausalLM, {}),  # non-gated
]


@pytest.mark.parametrize(("config_class", "model_class", "options"), FAMILIES)
@torch.inference_mode()
def test_every_family_gives_its_own_logits_and_keys(config_class, model_class, options):
    model = _model(config_class, model_class, **options)
    expected, keys = model(TOKENS).logits, list(model.state_dict())
    done = sparsellm.accelerate(model)
    assert len(done.accelerated) == 2
    assert not done.left_alone
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    generated = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 24)
    sparsellm.restore(model)
    assert torch.equal(model(TOKENS).logits, expected)
    assert "packed_down" not in dict(model.named_buffers())


@torch.inference_mode()
def test_our_model_and_compile(tiny):
    model = build_model(tiny(), eos_token_id=256).bfloat16().eval()
    expected = model(TOKENS).logits
    assert len(sparsellm.accelerate(model).accelerated) == 2
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True)
    x = torch.randn(3, 5, 32).bfloat16()
    torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))


def test_what_cannot_be_served_is_named_and_left_alone():
    silu = _model(LlamaConfig, LlamaForCausalLM, hidden_act="silu")
    done = sparsellm.accelerate(silu)
    assert done.left_alone["model.layers.1.mlp"] == "its activation is not ReLU"
    assert "left alone: model.layers.0.mlp: its activation is not ReLU" in str(done)
    fp32 = sparsellm.accelerate(_model(LlamaConfig, LlamaForCausalLM).float())
    assert "torch.float32, not torch.bfloat16" in fp32.left_alone["model.layers.0.mlp"]
    with pytest.raises(ValueError, match=r"threshold -1\.0 must not be negative"):
        sparsellm.accelerate(silu, threshold=-1.0)


def test_training_goes_through_the_dense_path():
    model = _model(LlamaConfig, LlamaForCausalLM)
    sparsellm.accelerate(model)
    model(TOKENS).logits.float().sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_accelerating_again_takes_the_new_weights():
    model = _model(LlamaConfig, LlamaForCausalLM)
    sparsellm.accelerate(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
        sparsellm.accelerate(model)
        found = model(TOKENS).logits
        sparsellm.restore(model)
        torch.testing.assert_close(found, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


@given(st.integers(1, 100), st.integers(1, 70))
@settings(max_examples=30)
def test_packing_is_a_permutation(k, n):
    w = torch.randn(k, n)
    assert torch.equal(unpack_down(pack_down(w), k), w)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_operator_equals_its_formula(gated, threshold):
    x, w_gate, w_up = (torch.randn(s, 16, dtype=torch.float64) for s in (7, 24, 24))
    w_down = torch.randn(16, 24, dtype=torch.float64)
    biases = [torch.randn(s, dtype=torch.float64) for s in (24, 24, 16)]

    def fatrelu(value):
        return torch.where(value > threshold, value, 0)

    up = F.linear(x, w_up, biases[1])
    h = fatrelu(F.linear(x, w_gate, biases[0])) * up if gated else fatrelu(up)
    gate = (w_gate, biases[0]) if gated else (None, None)
    y = sparse_ffn(x, gate[0], w_up, pack_down(w_down), gate[1], biases[1], biases[2], threshold)
    torch.testing.assert_close(y, F.linear(h, w_down, biases[2]))
    torch.library.opcheck(
        sparse_ffn,
        (x, gate[0], w_up, pack_down(w_down), gate[1], biases[1], biases[2], threshold),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_shapes_that_do_not_fit_are_named():
    x, w = torch.randn(3, 12), torch.randn(16, 12)
    with pytest.raises(ValueError, match=r"hidden_size 12 .* multiples of 8"):
        sparse_ffn(x, w, w, pack_down(w.t()), None, None, None, 0.0)
    with pytest.raises(ValueError, match="do not belong together"):
        sparse_ffn(x, w, w, w, None, None, None, 0.0)
