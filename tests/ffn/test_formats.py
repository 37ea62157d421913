"""TwELL and the hybrid format in plain torch, against plain loops and gradients in float64."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ffn.twell_values import unpack_twell
from sparsellm.ffn.formats import (
    FORMATS,
    empty_hybrid,
    hybrid_of,
    on_neurons,
    pack_twell,
    twell_overflows,
)
from sparsellm.ffn.reference import activations
from sparsellm.ffn.types import BackwardInputs, FFNWeights, MatrixGradients, Room

densities = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])


def _activations(m: int, n: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(m, n, generator=generator).abs() + 0.01
    active = torch.rand(m, n, generator=generator) < density
    return torch.where(active, values, 0).bfloat16()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 600)),
    density=densities,
    seed=st.integers(0, 10**6),
)
def test_twell_holds_each_rows_non_zeros_tile_by_tile(shape, density, seed):
    (m, n), gate = shape, _activations(*shape, density, seed)
    word = pack_twell(gate)
    width, tiles = 32, -(-n // 256)
    assert word.shape == (m, tiles, width)
    assert word.dtype == torch.int32
    for row in range(m):
        for tile in range(tiles):
            tile_values = gate[row, 256 * tile : 256 * (tile + 1)]
            neurons = tile_values.nonzero().flatten().tolist()
            words = [w & 0xFFFFFFFF for w in word[row, tile].tolist()]
            assert words[0] == len(neurons)
            stored = neurons[: width - 1]
            assert [w & 0xFFFF for w in words[1 : len(stored) + 1]] == [
                256 * tile + i for i in stored
            ]
            bits = tile_values[stored].view(torch.int16).int() & 0xFFFF
            assert [w >> 16 for w in words[1 : len(stored) + 1]] == bits.tolist()
    values, count = unpack_twell(word, n)
    overflows = twell_overflows(word)
    assert overflows.tolist() == [bool((row >= width).any()) for row in count]
    assert torch.equal(values[~overflows], gate[~overflows])
    assert int(count.sum()) == int((gate != 0).sum())


def test_twell_has_the_papers_size_and_refuses_neurons_that_it_cannot_number():
    assert pack_twell(torch.zeros(3, 5632)).shape == (3, 22, 32)  # M × N / 8 words
    last = torch.zeros(1, 65_536)
    last[0, -1] = -1.5
    assert torch.equal(unpack_twell(pack_twell(last), 65_536)[0], last.bfloat16())
    with pytest.raises(ValueError, match="65,544 neurons"):
        pack_twell(torch.zeros(1, 65_544))


class Case(NamedTuple):
    """A problem, and the room that its pattern gets."""

    m: int
    k: int
    n: int
    width: int
    backup_rows: int
    density: float
    gated: bool
    seed: int

    @property
    def room(self):
        return Room(self.backup_rows, self.width)


hybrid_cases = st.builds(
    Case,
    st.integers(1, 150),
    st.integers(2, 6),
    st.integers(1, 300),
    st.sampled_from([1, 4, 32, 128]),
    st.sampled_from([1, 8, 128]),
    st.sampled_from([0.001, 0.02, 0.2, 0.6]),
    st.booleans(),
    st.integers(0, 10**6),
)


def _problem(case):
    """x, dy and weights in float64; a feature that is always 1 decides how many are active."""
    m, k, n, _, _, density, gated, seed = case
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    level = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - density)))
    x_MK, first_NK = normal(m, k), normal(n, k) / k**0.5
    x_MK[:, 0], first_NK[:, 0] = 1, -level
    up_NK = normal(n, k) if gated else first_NK
    w = FFNWeights(first_NK if gated else None, up_NK, normal(k, n))
    return x_MK, normal(m, k), w


@settings(max_examples=40, deadline=None)
@given(hybrid_cases)
def test_the_hybrid_format_puts_each_row_where_it_belongs(case):
    m, _, n, width, backup_rows, *_ = case
    x, _, w = _problem(case)
    gate, up = activations(x, w)
    pattern = up if gate is None else gate
    saved = hybrid_of(gate, up, Room(backup_rows, width))
    heavy = []
    for row in range(m):
        neurons = pattern[row].nonzero().flatten().tolist()
        tiles = [sum(i // 256 == tile for i in neurons) for tile in range(-(-n // 256))]
        if len(neurons) > width or max(tiles) > 31:
            heavy.append(row)
            assert saved.length[row] == 0
        else:
            assert saved.length[row] == len(neurons)
            word = saved.word[row, : len(neurons)]
            assert (word & 0xFFFF).tolist() == neurons
            values = (word >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(values, pattern[row, neurons].bfloat16())
        assert int(saved.heavy[row // 32]) >> row % 32 & 1 == (row in heavy)
    assert saved.row[: saved.num_heavy].tolist() == heavy
    assert int(saved.recomputed) == max(len(heavy) - backup_rows, 0)
    for tensor, memory in zip(saved, empty_hybrid(x, n, case.room, gated=case.gated), strict=True):
        assert (tensor.shape, tensor.dtype) == (memory.shape, memory.dtype)
    for slot, row in enumerate(heavy[:backup_rows]):
        assert torch.equal(saved.backup_up[slot], up[row])
        assert gate is None or torch.equal(saved.backup_gate[slot], gate[row])
    light = torch.ones(m, dtype=torch.bool)
    light[heavy] = False
    assert torch.equal(on_neurons(saved.gate, saved, n)[light], pattern[light])
    for block in range(-(-m // 64)):
        block_rows = slice(64 * block, 64 * (block + 1))
        active = (pattern[block_rows][light[block_rows]] != 0).sum(0)
        assert torch.equal(saved.table[block].long(), active)


@settings(max_examples=30, deadline=None)
@given(hybrid_cases)
def test_forward_and_backward_whatever_overflows(case):
    """Against autograd through the dense formula."""
    x, dy, w = _problem(case)
    token = torch.randperm(len(x), generator=torch.Generator().manual_seed(case.seed)).int()
    inputs = [x, *(t for t in w[:3] if t is not None)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    leaf = iter(leaves[1:])
    weights = FFNWeights(*(None if t is None else next(leaf) for t in w[:3]))
    gate, up = activations(leaves[0], weights)
    h = up if gate is None else gate * up
    y = torch.nn.functional.linear(h, weights.down_KN)
    d_l1 = torch.tensor(0.3, dtype=torch.float64)
    expected = torch.autograd.grad((y * dy[token]).sum() + d_l1 * h.abs().sum(), leaves)

    actual_y, stats, saved = FORMATS["twell"].forward(x, w, case.room, token)
    torch.testing.assert_close(actual_y[token.long()], y.detach())
    assert float(stats.l1_sum) == pytest.approx(float(h.detach().abs().sum()))
    for_backward = BackwardInputs(dy, d_l1, x, w, saved, token)
    out = MatrixGradients.empty(w, torch.float64)
    dx = FORMATS["twell"].backward(for_backward, out, adds=False)
    gradients = (dx, out.gate_NK, out.up_NK, out.down_NK.t())
    for one, other in zip((g for g in gradients if g is not None), expected, strict=True):
        torch.testing.assert_close(one, other)
