"""Norms and RoPE of a block: what the compiled sides compute, and what is recorded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sparsellm.bench import block, timing

CPU = torch.device("cpu")
BATCH, CONTEXT, HIDDEN, INTERMEDIATE, HEADS = 2, 24, 64, 96, 4
TOKENS = BATCH * CONTEXT


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return dict(block.operations(BATCH, CONTEXT, HIDDEN, INTERMEDIATE, HEADS, CPU))


def _exact(operation, function, num_weights):
    """Outputs and gradients of a function in float64, on an operation's inputs."""
    inputs = [t.detach().double().requires_grad_() for t in operation.inputs]
    inputs += [torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True)] * num_weights
    outputs = function(*inputs)
    d_outputs = [d.double() for d in operation.d_outputs]
    return (*outputs, *torch.autograd.grad(outputs, inputs, d_outputs))


def _check(operation, function, num_weights=1):
    for name in operation.sides:
        expected = _exact(operation, function, num_weights)
        for found, wanted in zip(operation.step(name), expected, strict=True):
            assert block.relative_difference(found.detach(), wanted.detach()) < 0.01


def test_sides_of_a_norm_compute_the_norm(made):
    assert list(made["norm"].sides) == ["torch", "two_reductions"]
    _check(made["norm"], lambda x, w: (F.rms_norm(x, (HIDDEN,), w, block.EPS),))


@pytest.mark.parametrize("ordered", [False, True])
def test_sides_of_addition_and_norm_compute_both(made, ordered):
    operation = made["add_norm_ordered" if ordered else "add_norm"]
    token_M = torch.arange(TOKENS)
    if ordered:
        order = operation.sides["torch"].forward.keywords["order"]
        token_M = order.token_M.long()
        assert torch.equal(token_M[order.row_M], torch.arange(TOKENS))
        assert not torch.equal(token_M, torch.arange(TOKENS))

    def function(residual, attended, weight):
        total = residual + attended
        return total, F.rms_norm(total, (HIDDEN,), weight, block.EPS)[token_M]

    _check(operation, function)


def test_rope_is_that_of_the_model(made):
    operation = made["rope"]
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    x = torch.zeros(1, dtype=torch.bfloat16)
    expected = LlamaRotaryEmbedding(config)(x, torch.arange(CONTEXT)[None])
    found = block._rotary(CONTEXT, HIDDEN // HEADS, CPU)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0)
    rotary = tuple(t.double() for t in found)
    _check(operation, lambda q, k: block._rope(rotary, q, k), num_weights=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear", (HIDDEN, HIDDEN)),
        ("linear_up", (INTERMEDIATE, HIDDEN)),
        ("linear_down", (HIDDEN, INTERMEDIATE)),
    ],
)
def test_sides_of_a_linear_layer_add_its_gradients_up(made, name, shape):
    operation = made[name]
    assert list(operation.sides) == ["torch", "addmm"]
    x, dy = operation.x.detach().double(), operation.dy.double()
    for side, (linear, _) in operation.sides.items():
        assert linear.weight.shape == shape
        assert (linear.sum_NK is not None) == (side == "addmm")
        weight = linear.weight.detach().double()
        for count in (1, 2):
            exact = (x @ weight.t(), dy @ weight, count * dy.t() @ x)
            for found, wanted in zip(operation.step(side), exact, strict=True):
                assert block.relative_difference(found, wanted) < 0.01
        assert found.dtype == torch.float32


def test_sides_are_measured_against_torch_and_the_rate_of_a_copy(monkeypatch):
    compiled = []

    def compile(function, **options):
        compiled.append(options)
        return function

    def interleaved(sides, seconds, lead):
        assert (seconds, lead) == (0.5, "lead")
        for (call,) in sides.values():
            call()
        return dict(zip(sides, (2.0, 4.0), strict=False))

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "other_work", lambda device: "lead")
    monkeypatch.setattr(timing, "ceilings", lambda device: timing.Ceilings(1.0, 0.001))
    shape = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_heads": HEADS}
    shape |= {"context_length": CONTEXT}
    found = list(block.run([1, 2], **shape, device=CPU, seconds=0.5))
    names = [measured[0].case["operation"] for measured in found]
    linear = ["linear", "linear_up", "linear_down"]
    assert names == 2 * ["norm", "add_norm", "add_norm_ordered", "rope", *linear]
    assert [measured[0].case["M"] for measured in found] == 7 * [CONTEXT] + 7 * [2 * CONTEXT]
    by_name = {(m.case["side"], m.metric): m for m in found[0]}
    assert by_name["torch", "forward_backward"].ratio is None
    slow = by_name["two_reductions", "forward_backward"]
    assert (slow.value, slow.baseline, slow.ratio) == (4.0, 2.0, 0.5)
    num_bytes = 5 * CONTEXT * HIDDEN * 2
    assert by_name["torch", "copy_rate"].value == pytest.approx(num_bytes / 2e-3 / 1e6)
    assert by_name["two_reductions", "difference"].value == 0
    assert found[3][0].case["heads"] == HEADS
    assert [m.metric for m in found[4]] == [*2 * ["forward_backward"], "difference"]
    assert "N" not in found[4][0].case
    assert found[5][0].case["N"] == INTERMEDIATE
    two = {"dynamic": False, "options": {"triton.mix_order_reduction": False}}
    assert compiled[:2] == [{"dynamic": False, "options": None}, two]


def test_the_option_of_two_reductions_is_known_to_inductor():
    from torch._inductor import config

    assert config.triton.mix_order_reduction
