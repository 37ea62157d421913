"""What `sparsellm.accelerate` takes and what it leaves alone: by what a forward computes."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GptOssConfig,
    M2M100Config,
    MixtralConfig,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    T5Config,
)

import sparsellm
from sparsellm.ffn.inference_path.discover import Formula, Unsupported
from sparsellm.ffn.inference_path.formula import activation_formulas
from sparsellm.ffn.types import ELEMENTS

K, N = 32, 48


class GatedMLP(nn.Module):
    """Llama's, with a formula of its own."""

    def __init__(self, formula, bias: bool = False, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, N, bias=bias)
        self.up_proj = nn.Linear(K, N, bias=bias)
        self.down_proj = nn.Linear(N, K, bias=bias)
        self.act_fn = activation or nn.ReLU()
        self.formula = formula

    def forward(self, x, residual=None, scale=1.0):
        h = self.formula(self.act_fn, self.gate_proj(x), self.up_proj(x))
        y = self.down_proj(h) * scale
        return y if residual is None else y + residual


class FATReLU(nn.Module):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        return torch.where(x > self.threshold, x, 0.0)


def relu_gate(act, gate, up):
    return act(gate) * up


def drelu(act, gate, up):
    return act(gate) * act(up)


def _mlp(formula, **options) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(formula, **options).bfloat16().requires_grad_(False).eval()


def _tokens(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, K, generator=generator).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("formula", [relu_gate, drelu])
@pytest.mark.parametrize("activation", [nn.ReLU(), FATReLU(0.1), nn.Threshold(0.25, 0.0)])
def test_what_the_kernels_compute_is_taken(formula, activation, bias):
    mlp = _mlp(formula, activation=activation, bias=bias)
    x = _tokens(40)
    right = mlp(x)
    if formula is drelu and not isinstance(activation, nn.ReLU):
        # relu(up) is what the kernels have beside FATReLU of the gate
        assert "does not compute" in sparsellm.accelerate(mlp).left_alone[""]
        return
    done = sparsellm.accelerate(mlp, kernels="sparse")
    assert done.accelerated == [""]
    torch.testing.assert_close(mlp(x), right, rtol=2e-2, atol=2e-2)
    assert "sparse_ffn" in _operators(mlp, x)


def _operators(module: nn.Module, x: torch.Tensor) -> str:
    with torch.profiler.profile() as profile:
        module(x)
    return " ".join(event.name for event in profile.events())


def test_further_arguments_are_kept():
    mlp, residual = _mlp(relu_gate), _tokens(5)
    x = _tokens(5)
    right, with_residual, scaled = mlp(x), mlp(x, residual), mlp(x, scale=2.0)
    assert sparsellm.accelerate(mlp, kernels="sparse").accelerated == [""]
    assert torch.equal(mlp(x, residual), with_residual)
    assert torch.equal(mlp(x, residual=residual), with_residual)
    assert torch.equal(mlp(x, scale=2.0), scaled)
    for y in (mlp(x), mlp(x=x), mlp(x, None), mlp(x, residual=None)):
        torch.testing.assert_close(y, right, rtol=2e-2, atol=2e-2)
    assert "sparse_ffn" in _operators(mlp, x)
    with pytest.raises(TypeError, match="takes from 2 to 4 positional arguments but 5"):
        mlp(x, None, 1.0, 3)


def test_asking_for_fatrelu_only_adds_to_what_the_module_cuts():
    mlp = _mlp(relu_gate, activation=FATReLU(0.25))
    x = _tokens(20)
    sparsellm.accelerate(mlp, threshold=0.1, kernels="sparse")
    low = mlp(x)
    sparsellm.restore(mlp)
    torch.testing.assert_close(low, mlp(x), rtol=2e-2, atol=2e-2)
    sparsellm.accelerate(mlp, threshold=0.5, kernels="sparse")
    gate = mlp.gate_proj(x)
    h = torch.where(gate > 0.5, gate, 0) * mlp.up_proj(x)
    torch.testing.assert_close(mlp(x), F.linear(h, mlp.down_proj.weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("activation", "read"),
    [
        (nn.ReLU(), (0.0, "relu")),
        (F.relu, (0.0, "relu")),
        (FATReLU(0.5), (0.5, "relu")),
        (nn.Threshold(0.25, 0.0), (0.25, "relu")),
        (lambda x: x.relu().square(), (0.0, "relu2")),
        (lambda x: FATReLU(0.5)(x).pow(2), (0.5, "relu2")),
        (nn.SiLU(), None),
        (nn.Identity(), None),
        (nn.ReLU6(), None),
        (nn.LeakyReLU(1e-4), None),
        (nn.Threshold(-0.5, 0.0), None),
        (nn.Threshold(0.5, 0.25), None),
        (lambda x: x.square(), None),
        (lambda x: x.relu().pow(3), None),
        (lambda x: x.relu().sum(), None),
        (nn.Linear(3, 3), None),
    ],
)
@pytest.mark.parametrize("element", ELEMENTS)
def test_an_activation_is_read_from_all_its_values(activation, read, element):
    like = torch.empty(0, dtype=element)
    if read is None:
        with pytest.raises(Unsupported, match=r"its activation is .*, not ReLU or ReLU²"):
            activation_formulas(activation, like)
    else:
        assert activation_formulas(activation, like) == [Formula(read[0], False, read[1])]


def test_a_threshold_is_one_of_its_types_numbers():
    for element in (*ELEMENTS, torch.float32):
        like = torch.tensor(0.1, dtype=element)  # to which torch rounds it before it compares
        for name, act in (("relu", FATReLU(0.1)), ("relu2", lambda x: FATReLU(0.1)(x).square())):
            assert activation_formulas(act, like) == [Formula(float(like), False, name)]


@pytest.mark.parametrize(("loud", "is_accelerated"), [(50.0, True), (3e4, False)])
def test_what_overflows_fp16_while_it_is_tried(loud, is_accelerated):
    mlp = _mlp(relu_gate).half()
    mlp.up_proj.weight.mul_(loud)
    mlp.down_proj.weight.mul_(loud)
    x = 10 * torch.randn(20, K).half()
    assert not mlp(x).isfinite().all()
    done = sparsellm.accelerate(mlp, kernels="sparse")
    if is_accelerated:  # judged by the tokens that do not
        assert done.accelerated == [""]
    else:
        assert done.left_alone[""] == "its forward overflows torch.float16 on every random token"


def test_dropout_is_not_skipped_while_a_module_trains():
    mlp = nn.Sequential(
        OrderedDict(fc1=nn.Linear(K, N), act=nn.ReLU(), drop=nn.Dropout(1.0), fc2=nn.Linear(N, K))
    )
    mlp.bfloat16().requires_grad_(False).train()
    x, bias = _tokens(6), mlp.fc2.bias.expand(6, K)
    assert sparsellm.accelerate(mlp).accelerated == [""]
    assert mlp.training
    assert mlp.drop.training
    assert torch.equal(mlp(x), bias)
    assert not torch.equal(mlp.eval()(x), bias)


SIZES = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 1}
OPT = {**SIZES, "hidden_size": K, "ffn_dim": N, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {
    **SIZES,
    "d_model": K,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": N,
    "decoder_ffn_dim": N,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "activation_function": "relu",
}
T5 = {"vocab_size": 128, "d_model": K, "d_ff": N, "d_kv": 16, "num_layers": 2, "num_heads": 2}
PHI = {**SIZES, "hidden_size": K, "intermediate_size": N, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "num_ffns"),
    [
        (OPTConfig(**OPT), 2),
        (OPTConfig(**OPT, do_layer_norm_before=False), 2),
        (BartConfig(**SEQ2SEQ), 4),
        (M2M100Config(**SEQ2SEQ), 4),
        (T5Config(**T5), 4),
        (T5Config(**T5, feed_forward_proj="gated-relu"), 4),
        (PhiConfig(**PHI, num_hidden_layers=2, hidden_act="relu"), 2),
    ],
    ids=["opt", "opt-post-norm", "bart", "m2m100", "t5", "t5-gated", "phi"],
)
@torch.inference_mode()
def test_families_with_biases_and_other_names(config, num_ffns):
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    for parameter in model.parameters():  # biases and weights that matter
        parameter.copy_(0.2 * torch.randn_like(parameter))
    model.bfloat16()
    ids = torch.arange(2 * 20).view(2, 20) % 100 + 3
    inputs = {"input_ids": ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :7]
    expected, keys = model(**inputs).logits, list(model.state_dict())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    done = sparsellm.accelerate(model, kernels="sparse")
    assert len(done.accelerated) == num_ffns, str(done)
    assert not done.left_alone
    logits = model(**inputs).logits
    scale = expected.float().abs().max()
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=3e-2)
    other = copy.deepcopy(model)
    assert torch.equal(other(**inputs).logits, logits)
    assert list(model.state_dict()) == keys
    sparsellm.restore(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_an_ffn_of_a_layer_trains_by_its_own_forward_and_compiles():
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**OPT, dropout=0.0)).bfloat16()
    ids = torch.arange(20).view(1, 20) + 3
    plain = model(ids).logits
    sparsellm.accelerate(model, kernels="sparse")
    assert torch.equal(model(ids).logits, plain)
    model(ids).logits.float().sum().backward()
    assert model.model.decoder.layers[0].fc1.weight.grad.abs().sum() > 0
    layer = model.model.decoder.layers[0].eval().requires_grad_(False)
    x = _tokens(1, 9)
    assert "sparse_ffn" in _operators(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)


EXPERTS = {
    "hidden_size": K,
    "intermediate_size": N,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    **SIZES,
}


@pytest.mark.parametrize(
    "config", [MixtralConfig(**EXPERTS, hidden_act="relu"), GptOssConfig(**EXPERTS)]
)
def test_fused_experts_are_named(config):
    done = sparsellm.accelerate(AutoModelForCausalLM.from_config(config).bfloat16())
    assert set(done.left_alone) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert "4 experts are fused into 3-D weights (gate_up_proj)" in str(done)


def test_a_model_without_an_ffn_says_so():
    assert "nothing in this model looks like an FFN" in str(sparsellm.accelerate(nn.Linear(3, 3)))


def test_a_square_in_the_forward_itself_is_found_by_trying():
    class MLP(nn.Module):
        """As nanochat writes it: no attribute says what the activation is."""

        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)

        def forward(self, x):
            return self.c_proj(F.relu(self.c_fc(x)).square())

    torch.manual_seed(0)
    mlp, x = MLP().bfloat16().requires_grad_(False).eval(), _tokens(20)
    right = mlp(x)
    assert sparsellm.accelerate(mlp, kernels="sparse").accelerated == [""]
    torch.testing.assert_close(mlp(x), right, rtol=2e-2, atol=2e-2)
    assert "sparse_ffn" in _operators(mlp, x)
