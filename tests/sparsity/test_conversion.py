"""`replace_ffns`: what it replaces, keeps, and leaves alone with a reason."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import sparsellm
from sparsellm import SparseFFN

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def hugging_face(family: str, **further: object) -> nn.Module:
    """A small model; its weights are large enough to tell two activations apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **further)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
@pytest.mark.parametrize(
    ("family", "activation", "gated"),
    [("Llama", "relu", True), ("Qwen3", "relu2", True), ("Arcee", "relu2", False)],
)
def test_the_function_and_the_parameters_stay(family, activation, gated, kernels):
    model = hugging_face(family, hidden_act=activation)
    expected, parameters = model(IDS).logits, dict(model.named_parameters())
    result = sparsellm.replace_ffns(model, kernels=kernels)
    assert result.replaced == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert result.left_alone == {}
    assert str(result) == "2 FFNs replaced"
    ffn = model.model.layers[1].mlp
    assert isinstance(ffn, SparseFFN)
    assert (ffn.activation, ffn.gated, ffn.path) == (activation, gated, kernels)
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is parameter for name, parameter in parameters.items())
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("Llama", "hidden_act"),  # SiLU
        ("Gemma2", "hidden_activation"),  # GELU
    ],
)
def test_another_activation_is_what_the_saved_model_computes(family, key, tmp_path):
    model = hugging_face(family)
    result = sparsellm.replace_ffns(model, activation="relu")
    assert str(result) == "2 FFNs replaced"
    model.eval().save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert getattr(stock.config, key) == "relu"
    torch.testing.assert_close(stock.eval()(IDS).logits, model(IDS).logits)


T5_SHAPE = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4}


def test_weights_of_two_types_are_left_alone(tmp_path):
    """Of T5 in fp16, transformers keeps the down projection in fp32."""
    config = T5Config(**T5_SHAPE, num_layers=1, dropout_rate=0.0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    for activation in (None, "relu2"):
        result = sparsellm.replace_ffns(model, activation=activation)
        reason = "its weights are torch.float16 and torch.float32; convert them to one type"
        assert set(result.left_alone.values()) == {reason}


@pytest.mark.parametrize(("before", "after"), [("gated-gelu", "gated-relu2"), ("relu", "relu2")])
def test_another_activation_of_t5_is_what_the_saved_model_computes(before, after, tmp_path):
    config = T5Config(**T5_SHAPE, num_layers=2, dropout_rate=0.0, feed_forward_proj=before)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    result = sparsellm.replace_ffns(model, activation="relu2")
    assert str(result) == "4 FFNs replaced"
    model.save_pretrained(tmp_path)
    stock = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (stock.config.feed_forward_proj, stock.config.dense_act_fn) == (after, "relu2")
    tokens = {"input_ids": IDS, "decoder_input_ids": IDS}
    torch.testing.assert_close(stock(**tokens).logits, model(**tokens).logits)


def test_a_configuration_whose_activation_something_else_uses_stays(tmp_path):
    """In Qwen3-Next, a convolution has the same one."""
    few = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    model = hugging_face("Qwen3Next", head_dim=16, linear_value_head_dim=8, **few, **layers)
    result = sparsellm.replace_ffns(model, activation="relu")
    assert result.not_in_config == result.replaced == ["model.layers.0.mlp", "model.layers.1.mlp"]
    expected = model.eval()(IDS, use_cache=False).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    sparsellm.replace_ffns(again, activation="relu")
    torch.testing.assert_close(again(IDS, use_cache=False).logits, expected)


def test_an_activation_that_is_called_as_a_function_is_replaced_too():
    model = hugging_face("Lfm2", block_auto_adjust_ff_dim=False, full_attn_idxs=[0])
    result = sparsellm.replace_ffns(model)
    assert "; activation='relu' replaces it" in str(result)
    result = sparsellm.replace_ffns(model, activation="relu")
    assert len(result.replaced) == 2
    ffn, x = model.model.layers[0].feed_forward, torch.randn(3, 32)
    h = F.relu(x @ ffn.w1.weight.t()) * (x @ ffn.w3.weight.t())
    torch.testing.assert_close(ffn(x), h @ ffn.w2.weight.t())


def test_dropout_by_a_function_is_not_lost():
    model = hugging_face("SeedOss", head_dim=16)
    state = torch.get_rng_state()
    result = sparsellm.replace_ffns(model, activation="relu")
    assert result.replaced == []
    assert "such as dropout, which would be lost; set its dropout to 0" in str(result)
    assert torch.equal(torch.get_rng_state(), state)
    for layer in model.model.layers:
        layer.mlp.residual_dropout = 0.0
    assert len(sparsellm.replace_ffns(model, activation="relu").replaced) == 2
    assert model.model.layers[0].mlp.training


def test_ffns_replaced_before_are_listed_and_count_in_the_configuration():
    model = hugging_face("Llama")
    sparsellm.replace_ffns(model, "model.layers.0.mlp", activation="relu")
    result = sparsellm.replace_ffns(model, activation="relu2")
    assert result.left_alone == {"model.layers.0.mlp": "it is a SparseFFN already"}
    assert result.not_in_config == result.replaced == ["model.layers.1.mlp"]
    assert model.config.hidden_act == "silu"
    model = hugging_face("Llama")
    sparsellm.replace_ffns(model, "model.layers.0.mlp", activation="relu")
    assert sparsellm.replace_ffns(model, activation="relu").not_in_config == []
    assert model.config.hidden_act == "relu"


def test_a_sparse_ffn_with_silu_takes_another_activation_too(tmp_path):
    """As of a SiLU model that `sparsellm.load` gave."""
    model, other = (hugging_face(family, hidden_act="silu") for family in ("Llama", "Llama"))
    for layer in model.model.layers:
        sparse = SparseFFN(32, 48, activation="silu", gated=True)
        sparse.load_state_dict(layer.mlp.state_dict())
        layer.mlp = sparse
    for each in (model, other):
        assert len(sparsellm.replace_ffns(each, activation="relu").replaced) == 2
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(saved(IDS).logits, model(IDS).logits, atol=1e-5)


def test_the_configuration_does_not_speak_of_ffns_that_stay(tmp_path):
    model = hugging_face("Llama")
    result = sparsellm.replace_ffns(model, "model.layers.0.mlp", activation="relu")
    assert result.left_alone == {}
    assert result.not_in_config == ["model.layers.0.mlp"]
    assert "after from_pretrained, call replace_ffns again as here" in str(result)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    sparsellm.replace_ffns(again, "model.layers.0.mlp", activation="relu")
    torch.testing.assert_close(again.eval()(IDS).logits, model(IDS).logits)


def test_an_activation_that_has_to_be_replaced_is_named():
    model = hugging_face("Llama")  # SiLU
    left = sparsellm.replace_ffns(model)
    assert left.replaced == []
    reason = "its activation is SiLUActivation, not ReLU or ReLU²; activation='relu' replaces it"
    assert left.left_alone["model.layers.0.mlp"] == reason
    assert str(left).splitlines() == [
        "0 FFNs replaced",
        f"left alone: model.layers.0.mlp and 1 more: {reason}",
    ]


def test_weights_that_are_no_plain_memory_are_left_alone():
    """As those of libraries that quantise; they call their type bf16 or fp32."""
    model = hugging_face("Llama", hidden_act="relu")
    up = model.model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(TwoTensor(up.weight.detach(), up.weight.detach()))
    result = sparsellm.replace_ffns(model)
    assert result.replaced == ["model.layers.0.mlp"]
    [reason] = result.left_alone.values()
    assert reason == "the weight of its up_proj is a TwoTensor, which the kernels cannot read"


class HostLinear(nn.Linear):
    """As speedruns have it: fp32 weights, computing in the type of x."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class HostMLP(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.c_fc = HostLinear(16, 64, bias=False)
        self.c_proj = HostLinear(64, 16, bias=False)
        self.scale = scale

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square()) * self.scale


class Host(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HostMLP(scale) for _ in range(3))


def test_a_host_with_layers_and_names_of_its_own():
    model = Host()
    x = torch.randn(4, 16).bfloat16()
    expected = [block(x) for block in model.blocks]
    result = sparsellm.replace_ffns(model, "blocks.[01]", projections=("c_fc", "c_proj"))
    assert result.replaced == ["blocks.0", "blocks.1"]
    assert isinstance(model.blocks[2], HostMLP)
    ffn = model.blocks[0]
    assert isinstance(ffn.c_fc, HostLinear)
    assert list(ffn.state_dict()) == ["c_fc.weight", "c_proj.weight"]
    assert torch.equal(ffn(x), expected[0])  # in bf16, by the host's own layers
    ffn.use_kernels("sparse")
    torch.testing.assert_close(ffn(x), expected[0], rtol=0.02, atol=0.002)
    assert ffn(x).dtype == torch.bfloat16


def test_an_ffn_that_a_model_has_under_several_names_is_replaced_under_all():
    shared = HostMLP()
    model = nn.Sequential(shared, nn.Identity(), shared)
    assert sparsellm.replace_ffns(model).replaced == ["0"]
    assert isinstance(model[0], SparseFFN)
    assert model[2] is model[0]


def test_adapters_that_were_added_before_are_named():
    class Linear(nn.Module):  # as PEFT calls its own
        def __init__(self, base_layer) -> None:
            super().__init__()
            self.base_layer = base_layer

    model = Host()
    model.blocks[1].c_proj = Linear(model.blocks[1].c_proj)
    [reason] = sparsellm.replace_ffns(model).left_alone.values()
    assert reason == (
        f"its c_proj is a {__name__}.Linear, not an nn.Linear; call replace_ffns before you add "
        "adapters"
    )


def test_a_model_that_is_an_ffn_is_not_said_to_be_replaced():
    result = sparsellm.replace_ffns(HostMLP())
    assert result.replaced == []
    assert "the model itself: it cannot be replaced in place" in str(result)


def test_what_computes_something_else_is_left_alone():
    result = sparsellm.replace_ffns(Host(scale=0.5))
    assert result.replaced == []
    assert "does not compute relu(up)" in result.left_alone["blocks.0"]
    assert "activation=" not in str(result)  # it would be left alone all the same


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: hugging_face("Phi"), "its fc1 has a bias"),
        (lambda: hugging_face("Phi3"), "fused into one matrix"),
        (
            lambda: hugging_face("OPT", word_embed_proj_dim=32, ffn_dim=48, enable_bias=False),
            "there is no FFN to replace",
        ),
        (
            lambda: hugging_face("Llama", hidden_act="relu").double(),
            "its weights are torch.float64",
        ),
        (lambda: nn.Sequential(_with_dropout()), "its dropout of 0.1 (dropout) would be lost"),
    ],
)
def test_what_cannot_be_replaced_is_listed_with_the_reason(model, reason):
    result = sparsellm.replace_ffns(model())
    assert result.replaced == []
    assert result.left_alone
    assert all(reason in why for why in result.left_alone.values())


def _with_dropout() -> nn.Module:
    ffn = HostMLP()
    ffn.dropout = nn.Dropout(0.1)
    return ffn


def test_weights_that_are_not_there_yet():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu"))
    assert "meta device" in sparsellm.replace_ffns(model).left_alone["model.layers.0.mlp"]
    names = ("gate_proj", "up_proj", "down_proj")
    conversion = sparsellm.replace_ffns(model, projections=names, activation="relu2")
    assert len(conversion.replaced) == 2
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert int(model.model.layers[0].mlp._columns[0]) == 2**31  # not there, but on the host


def test_unknown_names_and_arguments_name_the_remedy():
    model = Host()
    with pytest.raises(ValueError, match=r"no module 'block.0'; the nearest is blocks.0"):
        sparsellm.replace_ffns(model, ["block.0"])
    with pytest.raises(ValueError, match="activation 'gelu' must be relu or relu2"):
        sparsellm.replace_ffns(model, activation="gelu")
    with pytest.raises(ValueError, match=r"must be \(up, down\) or \(gate, up, down\)"):
        sparsellm.replace_ffns(model, projections=("c_fc",))
    for names in (("c_fc", "c_proj"), ("gate", "up", "up"), "abc"):
        with pytest.raises(ValueError, match="with gated=True these must be gate, up, down"):
            SparseFFN(16, 32, gated=True, names=names)
    with pytest.raises(
        ValueError, match="hidden_size 16 and intermediate_size 0 must be at least 1"
    ):
        SparseFFN(16, 0, gated=True)
    with pytest.raises(ValueError, match="activation 'gelu' must be one of relu, relu2, silu"):
        SparseFFN(16, 32, activation="gelu", gated=True)
    conversion = sparsellm.replace_ffns(model, "blocks.0", projections=("up", "down"))
    assert conversion.left_alone == {"blocks.0": "its up is missing"}
