"""An accelerated model has one copy of W_d, and is saved, copied, moved and trained as before."""

from __future__ import annotations

import copy
import io

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import sparsellm
from sparsellm.ffn.inference_path.memory_layout import transposed_in_place

TOKENS = torch.arange(2 * 20).view(2, 20) % 128
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="relu",
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).bfloat16().eval()


def num_bytes(model: nn.Module) -> int:
    """Of the distinct memory of parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_transposed(weight: torch.Tensor) -> bool:
    return weight.t().is_contiguous() and not weight.is_contiguous()


@pytest.mark.parametrize("inference_mode", [True, False])
def test_accelerating_takes_no_memory_and_restoring_gives_the_layout_back(model, inference_mode):
    before, state, parameters = num_bytes(model), values(model), list(model.parameters())
    with torch.inference_mode(inference_mode):
        sparsellm.accelerate(model)
        model(TOKENS)
    assert num_bytes(model) == before
    assert is_transposed(model.get_parameter(DOWN))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert same(model.state_dict(), state)
    sparsellm.accelerate(model)  # again
    assert num_bytes(model) == before
    sparsellm.restore(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert num_bytes(model) == before
    assert same(model.state_dict(), state)


def test_a_model_made_in_inference_mode_too(model):
    with torch.inference_mode():
        made = copy.deepcopy(model)
        expected = made(TOKENS).logits
    before = num_bytes(made)
    assert len(sparsellm.accelerate(made).accelerated) == 2
    assert num_bytes(made) == before
    with torch.no_grad():
        torch.testing.assert_close(made(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    sparsellm.restore(made)
    assert made.get_parameter(DOWN).is_contiguous()


def test_files_hold_the_weights_as_they_were(model, tmp_path):
    state = values(model)
    sparsellm.accelerate(model)
    model.save_pretrained(tmp_path)
    safetensors.torch.save_model(model, str(tmp_path / "whole.safetensors"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert same(LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), state)
    of_file = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(of_file[DOWN], state[DOWN])
    whole = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    assert torch.equal(whole[DOWN], state[DOWN])
    assert same(torch.load(tmp_path / "state.pt"), state)


def test_copies_and_moved_models_have_one_copy_each(model):
    plain = copy.deepcopy(model)
    sparsellm.accelerate(model)
    size = num_bytes(model)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    with torch.no_grad():
        logits = model(TOKENS).logits
        for other in (copy.deepcopy(model), loaded, copy.deepcopy(model).half()):
            assert is_transposed(other.get_parameter(DOWN))
            assert num_bytes(other) == size
            expected = plain.to(other.dtype)(TOKENS).logits
            torch.testing.assert_close(other(TOKENS).logits, expected, rtol=4e-2, atol=4e-2)
            other.get_parameter(DOWN).zero_()
            assert not torch.allclose(other(TOKENS).logits, expected, rtol=4e-2, atol=4e-2)
        assert torch.equal(model(TOKENS).logits, logits)
    assert is_transposed(copy.deepcopy(model).to("meta").get_parameter(DOWN))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_are_computed_with(model, assign):
    other = {name: -2 * tensor for name, tensor in values(model).items()}
    other["lm_head.weight"] = other["model.embed_tokens.weight"]  # tied
    sparsellm.accelerate(model, kernels="sparse")
    before = num_bytes(model)
    model.load_state_dict(other, assign=assign)
    with torch.no_grad():
        found = model(TOKENS).logits
        assert num_bytes(model) == before
        assert is_transposed(model.get_parameter(DOWN))
        assert same(model.state_dict(), other)
        sparsellm.restore(model)
        torch.testing.assert_close(found, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


def test_an_accelerated_model_trains_as_the_plain_one(model):
    plain = copy.deepcopy(model)
    sparsellm.accelerate(model)
    for each in (model, plain):
        each.train()
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(2):
            each(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=2e-2, atol=2e-2)
    assert is_transposed(model.get_parameter(DOWN))
    model.eval()
    with torch.no_grad():
        found = model(TOKENS).logits
        sparsellm.restore(model)
        torch.testing.assert_close(found, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


def test_layers_that_share_their_weights_and_ffns_within_a_layer(model):
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight  # one parameter in two FFNs
    before = num_bytes(model)
    sparsellm.accelerate(model)
    assert num_bytes(model) == before
    assert second.down_proj.weight is first.down_proj.weight
    config = OPTConfig(
        vocab_size=128,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=64,
    )
    opt = OPTForCausalLM(config).bfloat16().eval()
    before = num_bytes(opt)
    assert len(sparsellm.accelerate(opt).accelerated) == 2
    with torch.no_grad():
        opt(TOKENS)
    assert num_bytes(opt) == before
    assert is_transposed(opt.model.decoder.layers[0].fc2.weight)
    sparsellm.restore(opt)
    assert opt.model.decoder.layers[0].fc2.weight.is_contiguous()


def test_compiled_code_reads_a_weight_of_any_layout():
    weight = torch.randn(16, 24)
    found = torch.compile(transposed_in_place, backend="eager", fullgraph=True)(weight)
    assert found.is_contiguous()
    assert torch.equal(found, weight.t())
    assert weight.is_contiguous()  # a graph changes nothing
