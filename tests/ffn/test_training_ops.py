"""Training on the pattern against autograd of the dense formula; tests/gpu has the kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from sparsellm.ffn.formats import FORMATS
from sparsellm.ffn.training_path import training_ops
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import FFNWeights, TokenOrder


def _inputs(m, k, n, gated=True, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, dtype=dtype)
        return values.requires_grad_()

    x_MK, gate_NK = draw(m, k), draw(n, k) if gated else None
    return x_MK, FFNWeights(gate_NK, draw(n, k), draw(k, n))


def _at_density(x_MK, w, density):
    """The same, about that share active; ``crazy row``: nothing but all of the last token."""
    first = w.up_NK if w.gate_NK is None else w.gate_NK
    with torch.no_grad():  # a constant feature with a large weight
        x_MK[:, 0] = 1
        if density == "crazy row":
            x_MK[-1:, 0] = -1
        if density in (0.0, 1.0, "crazy row"):
            first[:, 0] = 100 if density == 1 else -100
        else:
            first[:, 0] = torch.where(torch.rand(len(first)) < density, 3.0, -3.0)
    return x_MK, w


def _dense(x_MK, w):
    up_MN = F.linear(x_MK, w.up_NK)
    gate_MN = F.relu(up_MN if w.gate_NK is None else F.linear(x_MK, w.gate_NK))
    h_MN = gate_MN if w.gate_NK is None else gate_MN * up_MN
    return F.linear(h_MN, w.down_KN), h_MN.abs().sum(), gate_MN != 0


def _present(x_MK, w):
    return [tensor for tensor in (x_MK, *w[:3]) if tensor is not None]


def _assert_equal_to_dense(x_MK, w, capacity):
    y_MK, stats = sparse_ffn_training(x_MK, w, capacity)
    expected_MK, l1, active_MN = _dense(x_MK, w)
    assert torch.equal(y_MK, expected_MK)
    assert torch.equal(stats.l1_sum, l1)
    assert torch.equal(stats.nnz_M, active_MN.sum(1, dtype=torch.int32))
    assert torch.equal(stats.active_N, active_MN.sum(0, dtype=torch.int32))
    blocks = active_MN.split(64)
    assert int(stats.union_sum) == sum(int(block.any(0).sum()) for block in blocks)
    assert not any(t.requires_grad for t in (stats.nnz_M, stats.active_N, stats.union_sum))
    dy_MK = torch.randn(y_MK.shape, dtype=y_MK.dtype)
    actual = torch.autograd.grad((y_MK * dy_MK).sum() + 0.7 * stats.l1_sum, _present(x_MK, w))
    expected = torch.autograd.grad((expected_MK * dy_MK).sum() + 0.7 * l1, _present(x_MK, w))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    return int(stats.union_sum)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 200), st.integers(1, 9), st.integers(1, 40)),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0, "crazy row"]),
    gated=st.booleans(),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_equals_dense_at_every_shape_density_and_capacity(shape, density, gated, share, seed):
    m, _, n = shape
    torch.manual_seed(seed)
    x_MK, w = _at_density(*_inputs(*shape, gated, seed=seed), density)
    worst = -(-m // 64) * n
    columns = _assert_equal_to_dense(x_MK, w, int(share * worst))
    certain = {0.0: 0, 1.0: worst, "crazy row": n if m else 0}
    assert columns == certain.get(density, columns)


@pytest.mark.parametrize("capacity", [0, 5, 24])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_in_float64(gated, capacity):
    x_MK, w = _inputs(67, 3, 12, gated, seed=3)
    names = [name for name, tensor in zip(w._fields, w, strict=True) if torch.is_tensor(tensor)]

    def run(x, *tensors):
        weights = w._replace(**dict(zip(names, tensors, strict=True)))
        y_MK, stats = sparse_ffn_training(x, weights, capacity)
        return y_MK, stats.l1_sum

    assert gradcheck(run, _present(x_MK, w), fast_mode=True)


@pytest.mark.parametrize("format", ["union", "twell"])
@pytest.mark.parametrize(
    ("gated", "capacity", "ordered"), [(True, 7, True), (True, 0, False), (False, 32, True)]
)
def test_operators_are_what_they_say(gated, capacity, ordered, format):
    x_MK, w = _inputs(70, 8, 16, gated, dtype=torch.float32)
    token_M = torch.randperm(70, dtype=torch.int32) if ordered else None
    operands = (x_MK, *w[:3], token_M, *(None,) * 8)
    room = (capacity, 8, format, "relu")
    operators = torch.ops.sparsellm
    torch.library.opcheck(operators.sparse_ffn_training.default, (*operands, *room))
    y_MK, l1_sum, *_, saved = operators.sparse_ffn_training(*operands, *room)
    detached = [t.detach() if torch.is_tensor(t) else t for t in operands]
    arguments = (y_MK.detach(), l1_sum.detach(), [t.detach() for t in saved], format, "relu")
    torch.library.opcheck(operators.sparse_ffn_backward.default, (*arguments, *detached))


def test_half_of_the_loss_and_half_of_the_weights():
    x_MK, w = _inputs(70, 8, 16)
    y_MK, stats = sparse_ffn_training(x_MK, w, 32)
    expected_MK, l1, _ = _dense(x_MK, w)
    for one, other in ((y_MK.sum(), expected_MK.sum()), (stats.l1_sum, l1)):
        actual, expected = (
            torch.autograd.grad(sum_, w.up_NK, retain_graph=True) for sum_ in (one, other)
        )
        torch.testing.assert_close(actual, expected)
    frozen = w._replace(gate_NK=w.gate_NK.detach(), down_KN=w.down_KN.detach())
    y_MK, stats = sparse_ffn_training(x_MK.detach(), frozen, 32)
    (y_MK.sum() + stats.l1_sum).backward()
    assert w.gate_NK.grad is None
    assert w.up_NK.grad.isfinite().all()


def test_under_autocast_fp32_weights_have_unrounded_gradients():
    x_MK, w = _inputs(256, 32, 64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y_MK, stats = sparse_ffn_training(x_MK, w, 4 * 64)
    assert (y_MK.dtype, stats.l1_sum.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(y_MK.float().square().sum() + stats.l1_sum, _present(x_MK, w))
    # What bf16 computes with, in float64.
    exact_x, *exact = (
        None if t is None else t.detach().bfloat16().double().requires_grad_()
        for t in (x_MK, *w[:3])
    )
    exact_w = FFNWeights(*exact)
    y_exact, l1, _ = _dense(exact_x, exact_w)
    expected = torch.autograd.grad(y_exact.square().sum() + l1, _present(exact_x, exact_w))
    for actual, other in zip(gradients, expected, strict=True):
        assert actual.dtype == torch.float32
        assert float((actual - other).norm() / other.norm()) < 0.01
    assert not torch.equal(gradients[2], gradients[2].bfloat16().float())


def test_bf16_weights_have_bf16_gradients():
    x_MK, w = _inputs(70, 8, 16, dtype=torch.bfloat16)
    y_MK, stats = sparse_ffn_training(x_MK, w, 32)
    gradients = torch.autograd.grad(y_MK.sum() + stats.l1_sum, _present(x_MK, w))
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


@pytest.mark.slow
def test_compiled_whole_and_not_anew_for_every_capacity():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    x_MK, w = _inputs(130, 8, 16, dtype=torch.float32)

    def run(capacity):
        y_MK, stats = sparse_ffn_training(x_MK.sin(), w, capacity)
        return y_MK, stats.l1_sum, stats.union_sum

    inductor = torch.compile(run, fullgraph=True)
    counted = torch.compile(run, fullgraph=True, backend=count)
    expected = run(48)
    gradients = torch.autograd.grad(expected[0].sum() + expected[1], _present(x_MK, w))
    for capacity in (48, 40, 20, 10):
        actual = inductor(capacity)
        torch.testing.assert_close(actual, expected)
        again = torch.autograd.grad(actual[0].sum() + actual[1], _present(x_MK, w))
        torch.testing.assert_close(again, gradients)
        counted(capacity)
    assert len(graphs) == 2  # the first size, then any


def test_overflow_and_recomputation_change_no_bit():
    x_MK, w = _inputs(130, 8, 16, dtype=torch.float32)

    def run(x, capacity):
        return sparse_ffn_training(x, w, capacity)

    outcomes = []
    for y_MK, stats in (
        run(x_MK, 48),
        run(x_MK, 10),
        checkpoint(run, x_MK, 48, use_reentrant=False),
        checkpoint(run, x_MK, 10, use_reentrant=False),
    ):
        gradients = torch.autograd.grad(y_MK.square().sum() + stats.l1_sum, _present(x_MK, w))
        present = [t for t in stats if t is not None]
        outcomes.append((y_MK, *present, *gradients))
    for plain, *other_outcomes in zip(*outcomes, strict=True):
        assert all(torch.equal(plain, other) for other in other_outcomes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_M": torch.arange(129).int()}, r"the order is \(129,\) but must be \(130,\)"),
        ({"token_M": torch.arange(130)}, "the order is torch.int64"),
        ({"up_NK": torch.zeros(16, 9)}, r"W_u is \(16, 9\) but must be \(16, 8\)"),
        ({"down_KN": torch.zeros(16, 8)}, r"W_d is \(16, 8\) but must be \(8, 16\)"),
        ({"gate_NK": torch.zeros(16, 8).double()}, "W_g is torch.float64"),
        ({"b_up_N": torch.zeros(16)}, "training takes no biases"),
        ({"capacity": 50}, "capacity 50 must be 0 to 48"),
        ({"capacity": -1}, "capacity -1"),
        ({"x_MK": torch.zeros(2, 65, 8)}, r"x \(2, 65, 8\) must be"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    x_MK, w = _inputs(130, 8, 16, dtype=torch.float32)
    change = {"x_MK": x_MK, "capacity": 48, "token_M": None} | change
    x_MK, capacity, token_M = (change.pop(name) for name in ("x_MK", "capacity", "token_M"))
    order = None if token_M is None else TokenOrder(token_M, torch.arange(130))
    with pytest.raises(ValueError, match=message):
        sparse_ffn_training(x_MK, w._replace(**change), capacity, order)


@pytest.mark.parametrize("gated", [True, False])
def test_the_module_computes_the_same_by_either_path(gated):
    torch.manual_seed(0)
    ffn = SparseFFN(16, 48, gated=gated)
    x_BTK = torch.randn(2, 70, 16)
    outcomes = []
    for kernels in ("dense", "sparse"):
        ffn.use_kernels(kernels)
        y_BTK, stats = ffn.forward_with_stats(x_BTK)
        ffn.zero_grad()
        (y_BTK.sum() + stats.l1_sum).backward()
        outcomes.append([y_BTK, *stats, *(p.grad.clone() for p in ffn.parameters())])
        assert torch.equal(ffn(x_BTK), y_BTK)
    dense, sparse = outcomes
    assert all(torch.equal(a, b) for a, b in zip(dense[:5], sparse[:5], strict=True))
    torch.testing.assert_close(dense[5:], sparse[5:])
    with torch.no_grad():
        assert ffn.capacity_for(140) == 0
        assert torch.equal(ffn(x_BTK), dense[0])


def test_the_module_compiles_whole():
    ffn = SparseFFN(16, 48, gated=True, kernels="sparse")
    x_MK = torch.randn(130, 16)
    compiled = torch.compile(ffn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x_MK), ffn(x_MK))
    compiled(x_MK).sum().backward()


def test_padding_of_the_last_block_fires_nothing():
    # 63 places of the second block stand for no token
    assert _assert_equal_to_dense(*_at_density(*_inputs(65, 4, 8), 1.0), 16) == 16


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_are_handed_bf16_weights_and_a_transposed_w_down(monkeypatch, gated):
    """What the operators do around the CUDA kernels; the specification stands in for them."""
    from sparsellm.ffn.kernels import union_training

    def forward(x_MK, w, room, token_M):
        assert w.down_KN.t().is_contiguous()
        assert {t.dtype for t in w if torch.is_tensor(t)} == {torch.bfloat16}
        return FORMATS["union"].forward(x_MK, w, room, token_M)

    def backward(inputs, out, adds):
        assert inputs.w.down_KN.t().is_contiguous()
        assert {t.dtype for t in out if t is not None} == {torch.float32}
        assert not adds
        return FORMATS["union"].backward(inputs, out, adds=adds)

    monkeypatch.setattr(union_training, "forward", forward)
    monkeypatch.setattr(union_training, "backward", backward)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    x_MK, w = _inputs(70, 8, 16, gated, dtype=torch.float32)
    bare = [None if t is None else t.detach() for t in w[:3]]
    token_M = torch.randperm(70, dtype=torch.int32)
    tensors = training_ops.FFNTensors(x_MK.detach().bfloat16(), *bare, token_M, *(None,) * 8)

    def run():
        y_MK, l1_sum, *counts, saved = torch.ops.sparsellm.sparse_ffn_forward(
            *tensors, 20, 128, "union", "relu"
        )
        gradients = torch.ops.sparsellm.sparse_ffn_backward(
            y_MK, l1_sum, saved, "union", "relu", *tensors
        )
        return [y_MK, l1_sum, *counts, *saved], gradients

    on_cpu = run()
    monkeypatch.setattr(training_ops, "runs_kernels", lambda x_MK: True)
    on_gpu = run()
    for tensor, other in zip(on_gpu, on_cpu, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensor, other, strict=True))
    matrices = on_gpu[1][1 : 4 if gated else 3]
    assert all(a.is_contiguous() and a.dtype == torch.float32 for a in matrices)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"dtype": torch.float32}, "sparse training takes only torch.bfloat16"),
        (
            {"dtype": torch.float16},
            "x is torch.float16; .* train in bf16, or with ffn.kernels=dense",
        ),
        ({"n": 12}, "must be multiples of 8"),
    ],
)
def test_what_kernels_cannot_do_is_said(inputs, message, monkeypatch):
    monkeypatch.setattr(training_ops, "runs_kernels", lambda x_MK: True)
    options = {"m": 70, "k": 8, "n": 16, "dtype": torch.bfloat16} | inputs
    x_MK, w = _inputs(**options)
    with pytest.raises(ValueError, match=message):
        sparse_ffn_training(x_MK, w, 20)
