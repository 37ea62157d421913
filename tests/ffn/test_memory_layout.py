"""An accelerated model has one copy of its weights, and is saved, moved and trained as before."""

import copy
import io

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsellm
from ffn.small_models import small_model
from sparsellm.decoding.sample import Sequences
from sparsellm.ffn.inference_path import accelerate, linears, memory_layout, replace
from sparsellm.ffn.inference_path.memory_layout import transposed_in_place
from sparsellm.model import model_config
from sparsellm.recipe import load_recipe
from sparsellm.recipe.estimate import count_parameters

TOKENS = torch.arange(2 * 20).view(2, 20) % 128
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model():
    return small_model(tie_word_embeddings=True, initializer_range=0.2)


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
        model_copy = copy.deepcopy(model)
        expected = model_copy(TOKENS).logits
    before = num_bytes(model_copy)
    assert len(sparsellm.accelerate(model_copy).accelerated) == 2
    assert num_bytes(model_copy) == before
    with torch.no_grad():
        torch.testing.assert_close(model_copy(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    sparsellm.restore(model_copy)
    assert model_copy.get_parameter(DOWN).is_contiguous()


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
        actual = model(TOKENS).logits
        assert num_bytes(model) == before
        assert is_transposed(model.get_parameter(DOWN))
        assert same(model.state_dict(), other)
        sparsellm.restore(model)
        torch.testing.assert_close(actual, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


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
        actual = model(TOKENS).logits
        sparsellm.restore(model)
        torch.testing.assert_close(actual, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


def test_layers_that_share_their_weights_and_ffns_within_a_layer(model):
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight  # one parameter in two FFNs
    before = num_bytes(model)
    sparsellm.accelerate(model)
    assert num_bytes(model) == before
    assert second.down_proj.weight is first.down_proj.weight
    opt = small_model("OPT", ffn_dim=96, word_embed_proj_dim=64)
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
    actual = torch.compile(transposed_in_place, backend="eager", fullgraph=True)(weight)
    assert actual.is_contiguous()
    assert torch.equal(actual, weight.t())
    assert weight.is_contiguous()  # a graph changes nothing


@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_fp8_reads_none_of_the_weights_that_go_to_the_cpu(model, gated):
    if not gated:
        model = small_model("Arcee", tie_word_embeddings=False, initializer_range=0.2)
    state = values(model)
    done = sparsellm.accelerate(model, precision="fp8")
    layers = [f"self_attn.{name}_proj" for name in "qkvo"]
    layers += ["mlp.gate_proj" if gated else "mlp.up_proj"]
    right = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layers}
    assert set(done.on_cpu) == (right if gated else right | {"lm_head.weight"})  # or tied
    assert same(model.state_dict(), state)
    prompt = torch.arange(2 * 60).view(2, 60) % 128

    def results():
        sequences = Sequences(model, prompt[:, :20], None, 41)
        decoded = [sequences.prompt_logits()]
        sequences.append(prompt[:, 20])
        decoded.append(sequences.step().clone())
        return [model(prompt).logits, model(prompt[:1]).logits, *decoded]

    before = results()
    for name in done.on_cpu:
        model.get_parameter(name).data.fill_(torch.nan)  # not counted as a change
    assert all(map(torch.equal, results(), before))


def fp8_bytes(config: LlamaConfig) -> int:
    """Of a model of which FP8 keeps gates, attention and head in 8 bits, with fp32 scales.

    A tied head's 16-bit weight stays for the embedding.
    """
    k, n, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = [(n, k), (queries, k), (keys, k), (keys, k), (k, queries)]  # rows, columns
    per_layer = sum(rows * columns + 4 * rows for rows, columns in matrices)
    per_layer += 2 * (2 * n * k) + 2 * 2 * k  # up and down, norms
    head = config.vocab_size * k + 4 * config.vocab_size
    embeddings = 2 * config.vocab_size * k
    return layers * per_layer + head + embeddings + 2 * k


def test_fp8_takes_less_memory_than_bf16(model):
    def resident(on_cpu=()):
        """Bytes of parameters, and of what this package derived from them."""
        tensors = [p for name, p in model.named_parameters() if name not in on_cpu]
        tensors += [b for name, b in model.named_buffers() if "sparsellm" in name]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    in_bf16 = resident()
    done = sparsellm.accelerate(model, precision="fp8")
    assert resident(done.on_cpu) == fp8_bytes(model.config) < in_bf16
    recipe = load_recipe("2b")
    config = model_config(recipe, recipe.padded_vocab_size - 1)
    in_bf16 = 2 * count_parameters(recipe).total
    assert round(in_bf16 / 2**30, 2) == 3.83
    assert round(fp8_bytes(config) / 2**30, 2) == 2.93


def test_weights_come_back_when_they_are_needed(model, monkeypatch):
    moved = []
    ours = memory_layout.move

    def spy(weight, device):
        moved.append((id(weight), device))
        ours(weight, device)

    for module in (linears, replace, accelerate):
        monkeypatch.setattr(module, "move", spy)
    done = sparsellm.accelerate(model, precision="fp8")
    weights = {id(model.get_parameter(name)) for name in done.on_cpu}
    assert {weight for weight, _ in moved} == weights
    moved.clear()
    with torch.no_grad():
        model(TOKENS)
    assert not moved
    model(TOKENS).logits.sum().backward()
    assert {weight for weight, _ in moved} >= weights
    moved.clear()
    sparsellm.restore(model)
    assert {weight for weight, _ in moved} >= weights
