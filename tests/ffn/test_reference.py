"""The reference ops against formulas in numpy and gradients in float64."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from sparsellm.ffn.reference import columns_of, dense_ffn, dense_of, empty_columns
from sparsellm.ffn.types import TOKEN_AT, Room


def _weights(m: int, k: int, n: int, density: float, seed: int) -> tuple[torch.Tensor, ...]:
    """x and weights in float64 whose gate is not zero on about ``density`` of its outputs.

    The first input feature is 1 and its gate weight a bias, drawn per neuron: a neuron is on for
    every token or for none, and near-zero pre-activations (where ReLU has no derivative) are
    avoided.
    """
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(m, k, generator=generator, dtype=torch.float64)
    x_MK[:, 0] = 1
    w_gate_NK = torch.randn(n, k, generator=generator, dtype=torch.float64) * 0.01
    active = torch.rand(n, generator=generator) < density
    w_gate_NK[:, 0] = torch.where(active, 1.0, -1.0)
    w_up_NK = torch.randn(n, k, generator=generator, dtype=torch.float64)
    w_down_KN = torch.randn(k, n, generator=generator, dtype=torch.float64)
    return x_MK, w_gate_NK, w_up_NK, w_down_KN


def _ffn(x_MK, *matrices, activation="relu"):
    *gate, up, down = (partial(F.linear, weight=weight) for weight in matrices)
    return dense_ffn(x_MK, gate[0] if gate else None, up, down, activation)


shapes = st.tuples(st.integers(1, 9), st.integers(2, 7), st.integers(1, 12))
densities = st.sampled_from([0.0, 0.1, 0.5, 1.0])


@settings(max_examples=40, deadline=None)
@given(shape=shapes, density=densities, seed=st.integers(0, 10**6))
def test_gated_is_the_papers_formula_with_exact_statistics(shape, density, seed):
    x, w_gate, w_up, w_down = _weights(*shape, density, seed)
    y, stats = _ffn(x, w_gate, w_up, w_down)
    gate = np.maximum(x.numpy() @ w_gate.numpy().T, 0)
    h = gate * (x.numpy() @ w_up.numpy().T)
    np.testing.assert_allclose(y.numpy(), h @ w_down.numpy().T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(float(stats.l1_sum), np.abs(h).sum(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(stats.nnz_M.numpy(), (gate != 0).sum(1))
    np.testing.assert_array_equal(stats.active_N.numpy(), (gate != 0).sum(0))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, density=densities, seed=st.integers(0, 10**6))
def test_non_gated_is_its_own_gate(shape, density, seed):
    x, w_up, _, w_down = _weights(*shape, density, seed)
    y, stats = _ffn(x, w_up, w_down)
    h = np.maximum(x.numpy() @ w_up.numpy().T, 0)
    np.testing.assert_allclose(y.numpy(), h @ w_down.numpy().T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(float(stats.l1_sum), h.sum(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(stats.nnz_M.numpy(), (h != 0).sum(1))


@settings(max_examples=15, deadline=None)
@given(shape=shapes, density=densities, seed=st.integers(0, 10**6))
def test_gradients_of_output_and_l1_in_float64(shape, density, seed):
    inputs = [w.requires_grad_() for w in _weights(*shape, density, seed)]

    def gated(*tensors):
        y, stats = _ffn(*tensors)
        return y, stats.l1_sum

    def non_gated(x, w_up, w_down):
        y, stats = _ffn(x, w_up, w_down)
        return y, stats.l1_sum

    assert gradcheck(gated, inputs)
    assert gradcheck(non_gated, [inputs[0], inputs[1], inputs[3]])


def test_l1_gradient_is_the_sign_on_the_pattern():
    x, w_gate, w_up, w_down = _weights(5, 4, 6, 0.5, seed=1)
    gate = torch.relu(x @ w_gate.T)
    w_up.requires_grad_()
    _ffn(x, w_gate, w_up, w_down)[1].l1_sum.backward()
    sign = torch.sign(gate * (x @ w_up.detach().T))
    torch.testing.assert_close(w_up.grad, (sign * gate).T @ x)


@pytest.mark.parametrize("m", [5, 130])
def test_silu_has_no_zeros(m):
    x, w_gate, w_up, w_down = _weights(m, 4, 6, 0.5, seed=1)
    w_gate[0, 0] = -2000  # exp underflows
    y, stats = _ffn(x, w_gate, w_up, w_down, activation="silu")
    assert float(y.abs().sum()) > 0
    assert stats.nnz_M.tolist() == [6] * m
    assert stats.active_N.tolist() == [m] * 6
    assert int(stats.union_sum) == 6 * (1 if m == 5 else 3)


class ReadsOfActivations(TorchDispatchMode):
    """Counts the operators that read a matrix of this shape and give something smaller."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_product = func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        reads = any(isinstance(a, torch.Tensor) and a.shape == self.shape for a in args)
        smaller = isinstance(out, torch.Tensor) and out.numel() < self.shape.numel()
        self.count += reads and smaller and not is_product
        return out


@pytest.mark.parametrize(
    ("activation", "l1", "reads"), [("silu", False, 0), ("silu", True, 1), ("relu", False, 1)]
)
def test_a_dense_ffn_computes_only_the_statistics_that_it_needs(activation, l1, reads):
    x, *matrices = _weights(7, 4, 64, 0.5, seed=1)
    for matrix in matrices:
        matrix.requires_grad_()
    products = [partial(F.linear, weight=matrix) for matrix in matrices]
    with ReadsOfActivations(torch.Size((7, 64))) as counted:
        y, stats = dense_ffn(x, *products, activation, l1=l1)
    assert counted.count == reads  # those of blocks are of another shape
    assert stats.l1_sum.requires_grad == l1
    assert (float(stats.l1_sum.detach()) > 0) == l1
    expected, _ = dense_ffn(x, *products, activation)
    assert torch.equal(y, expected)


def test_l1_is_accumulated_in_fp32_under_bf16():
    h = torch.full((4096, 64), 1.0, dtype=torch.bfloat16)
    eye = torch.eye(64, dtype=torch.bfloat16)
    # bf16 sums stop growing at 256; 4096 × 64 ones are 262,144.
    assert float(_ffn(h, eye, eye)[1].l1_sum) == pytest.approx(4096 * 64)


def test_places_of_a_column_are_those_of_the_kernels():
    # cuda/common/union.cuh, token_at: a thread of a warp's 16 × 8 result holds rows r, r + 8.
    assert TOKEN_AT[:16] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert TOKEN_AT[16:] == [16 + token for token in TOKEN_AT[:48]]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 150), st.integers(1, 12)),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    gated=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_columns_block_by_block_and_back(shape, density, gated, seed):
    (m, n), generator = shape, torch.Generator().manual_seed(seed)
    active = torch.rand(m, n, generator=generator) < density
    gate = torch.rand(m, n, generator=generator) + 0.1
    gate, up = torch.where(active, gate, 0), torch.randn(m, n, generator=generator)
    expected = []  # (block, neuron), as the format says it
    for block in range(-(-m // 64)):
        block_active = active[64 * block : 64 * (block + 1)]
        expected += [(block, neuron) for neuron in range(n) if block_active[:, neuron].any()]
    columns = columns_of(gate if gated else None, up if gated else gate, len(expected) + 3)
    pattern = columns.gate if gated else columns.up
    starts = [sum(block < b for block, _ in expected) for b in range(-(-m // 64) + 1)]
    assert columns.offset.tolist() == starts
    assert columns.neuron.tolist() == [neuron for _, neuron in expected] + [0] * 3
    for column, (block, neuron) in enumerate(expected):
        for place, token in enumerate(64 * block + t for t in TOKEN_AT):
            values = pattern[column, place]
            assert values == (gate[token, neuron] if token < m else 0)
            bit = int(columns.mask[column]) >> token % 64 & 1
            assert bit == (token < m and bool(active[token, neuron]))
    assert torch.equal(dense_of(columns, pattern, m, n), gate)
    if gated:
        member = torch.cat(
            [block_active.any(0).expand_as(block_active) for block_active in active.split(64)]
        )
        assert torch.equal(dense_of(columns, columns.up, m, n), torch.where(member, up, 0))
    else:
        assert columns.gate.shape == (0, 64)
    for capacity in (len(expected) // 2, (len(starts) - 1) * n):
        stored = columns_of(gate if gated else None, up, capacity)
        memory = empty_columns(gate[:, :0], n, Room(capacity), gated=gated)
        for values, empty in zip(stored, memory, strict=True):
            assert (values.shape, values.dtype) == (empty.shape, empty.dtype)
    small = columns_of(gate, up, len(expected) // 2)
    assert torch.equal(small.offset, columns.offset)
    assert small.neuron.tolist() == columns.neuron.tolist()[: len(expected) // 2]
