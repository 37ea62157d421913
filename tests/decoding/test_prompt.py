"""The forward pass of a prompt gives what transformers' own gives, by fewer operators."""

import cProfile
import pstats
from collections import Counter

import pytest
import torch
from runs.hf_models import MODELS, stock_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import sparsellm
from sparsellm.decoding import decoder, token_kernels, token_math
from sparsellm.decoding.sample import Sequences
from sparsellm.ffn import token_order
from sparsellm.ffn.kernels import linear

LENGTH = 40  # more than the windows of 20 and 24


def prompts(model, batch=3, padding=()):
    """Ids, and a mask for padding on the left; none without."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, model.config.vocab_size, (batch, LENGTH), generator=generator)
    if not padding:
        return ids, None
    return ids, (torch.arange(LENGTH) >= torch.tensor(padding)[:, None]).long()


class Operators(TorchDispatchMode):
    """Counts the operators that are called, those that only look at memory apart."""

    def __init__(self):
        super().__init__()
        self.computing, self.views = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        counter = self.views if function.is_view else self.computing
        counter[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padding", [(), (4, 0, 33)], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_caches_are_those_of_transformers(name, padding):
    model = stock_model(name)
    ids, mask = prompts(model, padding=padding)
    sequences = Sequences(model, ids, mask, LENGTH + 5)
    actual = sequences.prompt_logits()
    cache = DynamicCache()  # which keeps all positions, those beyond a window too
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    ).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    text = torch.ones_like(ids).bool() if mask is None else mask.bool()
    for memory, layer in zip(sequences._caches, cache.layers, strict=True):
        for pair in zip(memory, (layer.keys, layer.values), strict=True):
            ours, theirs = (x[:, :, :LENGTH].transpose(1, 2)[text] for x in pair)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def kernels(monkeypatch):
    """Plain torch in place of the kernels, which read rows without gaps; what was launched."""
    launched = []

    def stand_in(module, name, compute):
        def call(*arguments):
            launched.append(name)
            assert all(x.is_contiguous() for x in arguments if isinstance(x, torch.Tensor))
            return compute(*arguments)

        monkeypatch.setattr(module, name, call)

    def rotate_prompts(q_RN, k_RN, v_RN, num_tokens, heads, cache, first_M, after):  # noqa: PLR0917
        launched.append("rotate_prompts")
        slot_MT = torch.arange(num_tokens).expand(len(q_RN) // num_tokens, -1)
        position_MT = slot_MT if first_M is None else (slot_MT - first_M[:, None]).clamp(min=0)
        cos, sin = (x[position_MT.flatten(), None] for x in (after.cos_PD, after.sin_PD))
        q, k, v = (x.unflatten(-1, (-1, heads.size)) for x in (q_RN, k_RN, v_RN))
        if heads.rotates:
            q.copy_(token_math.rotated(q, cos, sin))
            k = token_math.rotated(k, cos, sin)
        for memory, x in zip(cache, (k, v), strict=True):
            memory[:, :, :num_tokens] = x.unflatten(0, slot_MT.shape).transpose(1, 2)

    def attend(qkv_MN, heads, cache, at):
        for memory in cache:  # plain torch reads what is to come too, times 0
            memory[:, :, int(at.slot) + 1 :] = 0
        return token_math.attend(qkv_MN, heads, cache, at)

    for module in (decoder, linear, token_kernels):
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    monkeypatch.setattr(token_kernels, "HEAD_SIZES", range(999))
    monkeypatch.setattr(token_kernels, "rotate_prompts", rotate_prompts)
    stand_in(token_kernels, "residual_norm", token_math.residual_norm)
    stand_in(token_kernels, "attend", attend)
    stand_in(linear, "linears", token_math.linears)
    return launched


@pytest.mark.parametrize("length", [1, 9, LENGTH])  # of two prompts: up to 64 tokens, and more
@pytest.mark.parametrize("name", [*MODELS, "one head of keys"])
@torch.no_grad()
def test_kernels_are_handed_what_they_read(name, length, kernels, monkeypatch):
    one_head = ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1})
    monkeypatch.setitem(MODELS, "one head of keys", one_head)
    model = stock_model(name)
    ids = prompts(model, 2)[0][:, :length]
    sequences = Sequences(model, ids, None, length + 2)
    actual = [sequences.prompt_logits()]
    sequences.append(ids[:, 0])
    actual.append(sequences.step())
    expected = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -2:]
    torch.testing.assert_close(torch.stack(actual, 1), expected, rtol=1e-4, atol=1e-5)
    num_norms = (4 if "Qwen3" in MODELS[name][0] else 2) * 3 + 1 + 2 * 3 + 1
    assert Counter(kernels)["residual_norm"] == num_norms
    assert Counter(kernels)["rotate_prompts"] == Counter(kernels)["attend"] == 3


@torch.no_grad()
def test_a_layer_needs_fewer_operators_and_waits_for_nothing(monkeypatch):
    # As on a GPU: an allocation and a launch.
    monkeypatch.setattr(decoder, "_residual_norm", lambda h, y, norm: torch.empty_like(h).copy_(h))
    stock_counts, counts = [], []
    for num_layers in (2, 3):
        model = stock_model("Llama 2").bfloat16()
        model.model.layers = model.model.layers[:num_layers]
        model.config.num_hidden_layers = num_layers
        ids, _ = prompts(model)
        with Operators() as stock:
            model(ids, use_cache=True, logits_to_keep=1)
        with Operators() as ours:
            Sequences(model, ids, None, LENGTH + 1).prompt_logits()
        assert ours.computing["aten._local_scalar_dense.default"] == 0
        stock_counts.append((stock.computing.total(), stock.views.total()))
        counts.append((ours.computing.total(), ours.views.total()))
    of_stock, of_ours = (
        [of_three - of_two for of_two, of_three in zip(*pair, strict=True)]
        for pair in (stock_counts, counts)
    )
    # With five operators of the FFN, and three views of mm's results that count as operators.
    assert of_ours[0] <= 26 < 0.6 * of_stock[0]
    assert of_ours[1] < of_stock[1]


def test_a_text_is_set_up_with_few_calls_of_functions():
    """For each layer; a model has up to 38."""
    counts = []
    for num_layers in (2, 3):
        model = stock_model("Llama 2")
        model.model.layers = model.model.layers[:num_layers]
        profile = cProfile.Profile()
        assert profile.runcall(decoder.why_no_step, model) is None
        profile.runcall(decoder.Decoder, model)
        counts.append(pstats.Stats(profile).total_calls)
    assert counts[1] - counts[0] < 200


@torch.no_grad()
def test_the_last_layer_computes_only_what_is_read():
    model = stock_model("ReLU, tied")
    ids, _ = prompts(model)
    shapes = []
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: shapes.append(x.shape[:2]) or forward(x)
    Sequences(model, ids, None, LENGTH + 1).prompt_logits()
    assert shapes == [(3, LENGTH), (3, LENGTH), (3, 1)]


@torch.no_grad()
def test_in_fp8_layers_of_the_same_tokens_share_what_is_quantised():
    with torch.device("cpu"):
        model = stock_model("ReLU, tied").bfloat16()
    sparsellm.accelerate(model, precision="fp8")
    ids, _ = prompts(model)
    with Operators() as ours:
        actual = Sequences(model, ids, None, LENGTH + 1).prompt_logits()
    # Queries, keys and values; the output, but for the last tokens of the last layer.
    assert ours.computing["sparsellm.quantise_rows.default"] == 2 * 3 - 1
    expected = model(ids, logits_to_keep=1).logits[:, -1]
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.1


@torch.no_grad()
def test_the_order_of_tokens_is_computed_and_ends_with_the_prompt(monkeypatch):
    monkeypatch.setattr(token_order, "MIN_TOKENS", 3 * LENGTH)
    model = stock_model("ReLU, tied").bfloat16()
    prefill = sparsellm.accelerate(model).prefill
    orders = []
    compute = prefill.token_M
    monkeypatch.setattr(prefill, "token_M", lambda x: orders.append(compute(x)) or orders[-1])
    ids, _ = prompts(model)
    Sequences(model, ids, None, LENGTH + 1).prompt_logits()
    assert [order is not None and len(order) for order in orders] == [3 * LENGTH, 3 * LENGTH, False]
    assert prefill.order is None
