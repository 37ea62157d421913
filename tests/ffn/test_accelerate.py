"""`sparsellm.accelerate` and its operator in plain torch; tests/gpu has the kernels."""

import copy

import pytest
import torch
import torch.nn.functional as F
from runs.hf_models import LLAMA3_ROPE

import sparsellm
from ffn.small_models import small_model
from sparsellm.ffn.dispatch import Costs
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.inference_path import replace
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import ELEMENTS, FFNWeights
from sparsellm.model import build_model

TOKENS = torch.arange(2 * 20).view(2, 20) % 128


NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
FAMILIES = [
    ("Llama", {}),
    ("Llama", {"mlp_bias": True}),
    ("Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
    ("Mistral", {"sliding_window": 8}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {}),
    ("SmolLM3", {"no_rope_layers": [1, 0], **NO_TOKENS}),
    ("Arcee", {}),  # non-gated
    ("Llama", {"hidden_act": "relu2"}),
    ("Arcee", {"hidden_act": "relu2", "mlp_bias": True}),
    ("Nemotron", {"hidden_act": "relu2"}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@pytest.mark.parametrize("element", ELEMENTS)
@torch.inference_mode()
def test_every_family_gives_its_own_logits_and_keys(family, options, element):
    model = small_model(family, **options).to(element)
    expected, keys = model(TOKENS).logits, list(model.state_dict())
    done = sparsellm.accelerate(model)
    assert len(done.accelerated) == 2
    assert not done.left_alone
    assert list(model.state_dict()) == keys
    tolerance = 3 * torch.finfo(element).eps
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=tolerance, atol=tolerance)
    generated = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 24)
    sparsellm.restore(model)
    assert torch.equal(model(TOKENS).logits, expected)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_every_family_decodes_and_trains_as_it_does(family, options):
    check_decoding_and_training(small_model(family, **options), TOKENS)


def check_decoding_and_training(model, tokens):
    """Token by token with a cache as at once; in training by the model's own forward."""
    plain = copy.deepcopy(model)
    assert len(sparsellm.accelerate(model, kernels="sparse").accelerated) == 2
    with torch.inference_mode():
        logits, cache = [], None
        for token in tokens.split(1, dim=1):
            out = model(token, past_key_values=cache, use_cache=True)
            logits.append(out.logits)
            cache = out.past_key_values
        expected = plain(tokens).logits
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=2e-2, atol=2e-2)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.train().parameters(), lr=1.0)
        each(tokens, labels=tokens).loss.backward()
        optimizer.step()
        each.eval()
    for trained, expected_weight in zip(model.parameters(), plain.parameters(), strict=True):
        # W_d has other strides, so sums may be in another order.
        torch.testing.assert_close(trained, expected_weight, rtol=2e-2, atol=2e-2)
    with torch.inference_mode():  # with the new weights
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=2e-2, atol=2e-2)
        assert not torch.allclose(plain(tokens).logits, expected, rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_our_model_and_compile(tiny):
    model = build_model(tiny(), eos_token_id=256).bfloat16().eval()
    expected = model(TOKENS).logits
    assert len(sparsellm.accelerate(model).accelerated) == 2
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True)
    x = torch.randn(3, 5, 32).bfloat16()
    torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))


@pytest.fixture
def orders(monkeypatch):
    """The order that each FFN is called in; 30 tokens are enough for one."""
    recorded = []

    def spy(x_MK, w, handle, token_M):
        recorded.append(token_M)
        return sparse_ffn(x_MK, w, handle, token_M)

    monkeypatch.setattr(replace, "sparse_ffn", spy)
    monkeypatch.setattr("sparsellm.ffn.token_order.MIN_TOKENS", 30)
    monkeypatch.setattr(replace, "FEW_TOKENS", 0)
    return recorded


@torch.inference_mode()
def test_a_prompt_is_computed_in_token_order_and_decoding_is_not(orders):
    model = small_model()
    expected = model(TOKENS).logits
    done = sparsellm.accelerate(model, token_order="auto")
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=2e-2, atol=2e-2)
    right = token_order(TOKENS, 128).token_M
    assert len(orders) == 2
    assert all(torch.equal(order, right) for order in orders)
    assert done.prefill.order is None
    orders.clear()
    model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [order is not None for order in orders] == [True, True, False, False, False, False]
    orders.clear()
    model(inputs_embeds=model.get_input_embeddings()(TOKENS))  # the embedding is called outside
    model(TOKENS[:1])
    model.model.layers[0].mlp(torch.zeros(2, 20, 64).bfloat16())
    assert orders[2:] == [None] * 3


@torch.inference_mode()
def test_an_order_does_not_outlive_its_forward_its_model_or_its_length(orders):
    model = small_model()
    sparsellm.accelerate(model, token_order="auto")
    twin = copy.deepcopy(model)
    with pytest.raises(IndexError):
        model(TOKENS + 1000)
    model(inputs_embeds=torch.zeros(2, 20, 64).bfloat16())
    assert orders == [None, None]
    orders.clear()
    twin(TOKENS)
    assert all(order is not None for order in orders)
    for each in (model, twin):
        sparsellm.restore(each)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    sparsellm.accelerate(model, token_order="none")
    orders.clear()
    model(TOKENS)
    assert orders == [None, None]
    with pytest.raises(ValueError, match="token_order 'yes' must be one of auto, none"):
        sparsellm.accelerate(model, token_order="yes")


@pytest.mark.slow
@torch.inference_mode()
def test_token_order_under_compile(monkeypatch):
    monkeypatch.setattr("sparsellm.ffn.token_order.MIN_TOKENS", 30)
    model = small_model()
    expected = model(TOKENS, use_cache=False).logits
    sparsellm.accelerate(model, token_order="auto")
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        logits = compiled(TOKENS, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)


def test_what_cannot_be_served_is_named_and_left_alone():
    silu = small_model(hidden_act="silu")
    done = sparsellm.accelerate(silu)
    assert done.left_alone["model.layers.1.mlp"] == (
        "its activation is SiLUActivation, not ReLU or ReLU²"
    )
    message = "left alone: model.layers.0.mlp and 1 more: its activation is SiLUActivation"
    assert message in str(done)
    fp32 = sparsellm.accelerate(small_model().float())
    reason = fp32.left_alone["model.layers.0.mlp"]
    assert "are torch.float32, not all torch.bfloat16 or all torch.float16" in reason
    assert "load the model with dtype=torch.bfloat16" in reason
    mixed = small_model()
    mixed.model.layers[1].mlp.up_proj.half()
    done = sparsellm.accelerate(mixed)
    assert done.accelerated == ["model.layers.0.mlp"]
    assert "torch.bfloat16 and torch.float16, not all" in done.left_alone["model.layers.1.mlp"]
    with pytest.raises(ValueError, match=r"threshold -1\.0 must not be negative"):
        sparsellm.accelerate(silu, threshold=-1.0)
    with pytest.raises(ValueError, match="kernels 'fast' must be one of auto, sparse, dense"):
        sparsellm.accelerate(small_model(), kernels="fast")


def test_a_model_that_is_not_on_a_gpu_is_left_alone(monkeypatch):
    monkeypatch.delenv("SPARSELLM_REFERENCE_KERNELS")
    model = small_model()
    done = sparsellm.accelerate(model, kernels="auto")
    assert not done.accelerated
    assert "on cpu, where the kernels do not run" in done.left_alone["model.layers.1.mlp"]
    assert "after model.cuda()" in str(done)
    assert "forward" not in vars(model.model.layers[0].mlp)


@torch.inference_mode()
def test_a_deep_copy_computes_with_its_own_weights():
    model = small_model()
    sparsellm.accelerate(model)
    other = copy.deepcopy(model)
    before = model(TOKENS).logits
    for layer in other.model.layers:
        layer.mlp.gate_proj.weight.zero_()
    assert torch.equal(model(TOKENS).logits, before)
    assert not torch.allclose(other(TOKENS).logits, before, atol=1e-2)
    sparsellm.restore(other)
    assert torch.equal(model(TOKENS).logits, before)


def test_a_forward_of_the_instance_comes_back():
    model = small_model()
    mlp = model.model.layers[0].mlp
    calls, plain = [], mlp.forward

    def own(x):  # as a hook would
        calls.append(len(x))
        return plain(x)

    vars(mlp)["forward"] = own
    sparsellm.accelerate(model)
    calls.clear()
    mlp.requires_grad_(False)
    mlp(torch.randn(3, 64).bfloat16())
    assert calls == []
    mlp(torch.randn(3, 64).bfloat16().requires_grad_())  # the dense path is the instance's own
    assert calls == [3]
    sparsellm.restore(model)
    assert vars(mlp)["forward"] is own


def test_no_tokens_at_all_and_restoring_twice():
    model = small_model()
    sparsellm.accelerate(model)
    mlp = model.model.layers[0].mlp
    assert mlp(torch.empty(0, 64).bfloat16()).shape == (0, 64)
    sparsellm.restore(model)
    sparsellm.restore(model)
    assert set(vars(mlp)) == set(vars(small_model().model.layers[0].mlp))


@pytest.mark.parametrize("gated", [True, False])
def test_few_tokens_of_a_dense_layer_skip_the_operator(gated, monkeypatch):
    module = SparseFFN(16, 24, gated=gated).bfloat16().requires_grad_(False).eval()
    x = torch.randn(2, 3, 16).bfloat16()
    expected = module(x)
    (dispatch,) = sparsellm.accelerate(module).dispatches.values()
    dispatch.observed.fill_(24)
    assert dispatch.choose(6, lambda: Costs(dense=1.0, fixed=2.0, per_neuron=0.0)) == "dense"
    with monkeypatch.context() as patch:
        patch.setattr(replace, "sparse_ffn", None)  # not to be called
        assert torch.equal(module(x), expected)
    sparsellm.accelerate(module, threshold=0.5)
    assert not torch.equal(module(x), expected)


@pytest.mark.parametrize("change", ["optimizer", "load", "accelerate"])
def test_a_changed_weight_is_seen_by_the_next_call(change):
    model = small_model()
    with torch.inference_mode():
        sparsellm.accelerate(model)
    if change == "load":
        model.load_state_dict({name: -2 * w for name, w in model.state_dict().items()})
    elif change == "accelerate":  # where another tensor takes the place of a weight
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data = -layer.mlp.down_proj.weight.detach()
        sparsellm.accelerate(model)
    else:
        model(TOKENS).logits.float().sum().backward()  # by the dense path
        assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        logits = model(TOKENS).logits
        sparsellm.restore(model)
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=2e-2, atol=2e-2)


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
    w = FFNWeights(gate[0], w_up, w_down, gate[1], biases[1], biases[2], threshold)
    w = w._replace(down_NK=w_down.t().contiguous())
    torch.testing.assert_close(sparse_ffn(x, w), F.linear(h, w_down, biases[2]))
    torch.library.opcheck(
        torch.ops.sparsellm.sparse_ffn.default,
        (x, *w[:2], w.down_NK, *w[3:9], None, None, 0, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def _refused(match: str, **changes):
    x_MK, w_NK = torch.randn(3, 16), torch.randn(24, 16)
    w = FFNWeights(w_NK, w_NK, w_NK.t().contiguous(), down_NK=w_NK)
    x_MK = changes.pop("x_MK", x_MK)
    with pytest.raises(ValueError, match=match):
        sparse_ffn(x_MK, w._replace(**changes))


def test_what_does_not_fit_is_named():
    w, w_12 = torch.randn(24, 16), torch.randn(24, 12)
    matrices = dict.fromkeys(("gate_NK", "up_NK", "down_NK"), w_12)
    matrices["down_KN"] = w_12.t().contiguous()
    _refused(r"hidden_size 12 .* multiples of 8", x_MK=torch.randn(3, 12), **matrices)
    _refused(r"W_d transposed is \(16, 24\) but must be \(24, 16\)", down_NK=w.t().contiguous())
    _refused(r"W_g is torch.float64 on cpu, not torch.float32 on cpu", gate_NK=w.double())
    _refused(r"W_d transposed is missing", down_NK=None)
    _refused(r"x is not contiguous", x_MK=torch.randn(16, 3).t())
    _refused(r"b_d is \(24,\) but must be \(16,\)", b_down_K=torch.randn(24))
    _refused(r"x \(3, 2, 16\) must be \(tokens, hidden_size\)", x_MK=torch.randn(3, 2, 16))
    _refused(r"threshold -1.0 must not be negative", threshold=-1.0)
    _refused(r"threshold nan must not be negative", threshold=float("nan"))
