"""The weights' gradients from columns against float64, and to the bit.

M tokens, K hidden_size, N intermediate_size, C columns of room.
"""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpu.conditions import each, poisoned
from sparsellm.ffn.kernels.weight_grad import group_columns, weight_grads
from sparsellm.ffn.types import BLOCK_TOKENS, BackwardInputs, Columns, FFNWeights, MatrixGradients

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_memory(architecture):
    """What a kernel reads before it is written shows: NaN, and the largest integers."""
    with poisoned():
        yield


class Case(NamedTuple):
    m: int
    k: int
    n: int
    density: float  # of the pattern where tokens and neurons are even
    gated: bool = True
    dtype: torch.dtype = torch.float32
    uneven: bool = True  # loud and silent tokens and neurons; some of each fire everywhere
    spare: int = 0  # C beyond the columns


BF16 = torch.bfloat16
CASES = [
    Case(1, 8, 8, 0.5),
    Case(64, 64, 32, 0.2, uneven=False),
    Case(65, 72, 40, 0.3, dtype=BF16, spare=1000),
    Case(1000, 520, 264, 0.05),
    Case(1000, 520, 264, 0.05, gated=False),
    Case(300, 1544, 776, 0.02, dtype=BF16),
    Case(300, 200, 776, 1.1, uneven=False),  # all neurons are active
    Case(300, 200, 776, 0.0, uneven=False, spare=1),  # nothing does
    Case(300, 200, 776, 0.0, gated=False, dtype=BF16, uneven=False, spare=50_000),
    Case(4096, 136, 520, 0.02),  # split groups
    Case(5000, 1032, 264, 0.3, gated=False),
    Case(16384, 2048, 5632, 0.004),
    Case(16384, 2048, 5632, 0.004, dtype=BF16),
    Case(2048, 4096, 14336, 0.01, dtype=BF16),
    Case(3000, 64, 4096, 1.1, uneven=False),
    Case(300, 64, 65536, 0.01),
    Case(70000, 64, 512, 0.02),
]


def _fuzz(count: int) -> list[Case]:
    """Shapes about the edges of blocks, groups and slices; the same ones every time."""
    draw = random.Random(0)

    def near(step: int, most: int) -> int:
        return max(8, step * draw.randint(0, most // step) + draw.choice((-8, 0, 8)))

    def case() -> Case:
        m = max(1, draw.choice((64, 1024)) * draw.randint(0, 5) + draw.choice((-1, 0, 1, 17)))
        return Case(
            m,
            near(draw.choice((64, 512)), 1600),
            near(32, 900),
            draw.choice((0.001, 0.01, 0.1, 0.6)),
            draw.random() < 0.6,
            draw.choice((torch.float32, BF16)),
            draw.random() < 0.7,
            draw.choice((0, 0, 7, 10_000)),
        )

    return [case() for _ in range(count)]


class Inputs(NamedTuple):
    """What `weight_grads` takes, and the dense matrices (M, N) that it is made of."""

    columns: Columns
    d_gate: Tensor | None
    d_up: Tensor
    x_MK: Tensor
    dy_MK: Tensor
    active_MN: Tensor
    dense: tuple[Tensor | None, Tensor, Tensor | None, Tensor]  # gate, up, d_gate, d_up; bf16


def pattern_of(case: Case, device: torch.device) -> Tensor:
    """Which neurons are active for each token; (M, N) bool, the same every time."""
    generator = torch.Generator(device).manual_seed(case.m + case.n)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    chance: Tensor | float = case.density
    if case.uneven:
        chance = chance * 4 * rand(case.m, 1) ** 3 * 6 * rand(1, case.n) ** 5
    is_active = rand(case.m, case.n) < chance
    if case.uneven:
        is_active |= (rand(case.m, 1) < 2 / case.m) | (rand(1, case.n) < 2 / case.n)
        is_active &= (rand(case.m, 1) > 0.2) & (rand(1, case.n) > 0.3)
        # Neighbours fall silent together, so that whole blocks and groups do.
        is_active &= (rand(-(-case.m // 100), 1) > 0.2).repeat_interleave(100, 0)[: case.m]
    return is_active


def columns_of(active_MN: Tensor, spare: int = 0) -> Columns:
    """The pattern as columns; what is beyond them is not to be read."""
    m, n = active_MN.shape
    blocks = -(-m // BLOCK_TOKENS)
    padded = active_MN.new_zeros(blocks * BLOCK_TOKENS, n)
    padded[:m] = active_MN
    tokens_BTN = padded.view(blocks, BLOCK_TOKENS, n)
    block, neuron = tokens_BTN.any(1).nonzero(as_tuple=True)
    bit = torch.ones(BLOCK_TOKENS, dtype=torch.int64, device=active_MN.device)
    bit <<= torch.arange(BLOCK_TOKENS, device=active_MN.device)
    mask = torch.zeros(blocks, n, dtype=torch.int64, device=active_MN.device)
    for token in range(BLOCK_TOKENS):  # all at once would take 8 bytes a pair
        mask += tokens_BTN[:, token] * bit[token]
    offset = torch.zeros(blocks + 1, dtype=torch.int32, device=active_MN.device)
    offset[1:] = torch.bincount(block, minlength=blocks).cumsum(0)
    beyond = torch.full((spare,), -1, device=active_MN.device)
    none = torch.empty(0, BLOCK_TOKENS, dtype=BF16, device=active_MN.device)
    neuron, mask = torch.cat((neuron, beyond)).int(), torch.cat((mask[block, neuron], beyond))
    return Columns(offset, neuron, mask, gate=none, up=none, needed=offset[-1:])


def values_of(columns: Columns, dense_MN: Tensor) -> Tensor:
    """Columns of a dense matrix's values, (C, 64), in the order of the union format."""
    (m, n), used = dense_MN.shape, int(columns.offset[-1])
    blocks = columns.offset.numel() - 1
    padded = dense_MN.new_zeros(blocks * BLOCK_TOKENS, n)
    padded[:m] = dense_MN
    sizes = columns.offset.diff()
    block = torch.arange(blocks, device=sizes.device).repeat_interleave(sizes)
    place = torch.arange(BLOCK_TOKENS, device=sizes.device)
    within = place % 16
    token = place // 16 * 16 + within // 2 % 2 * 8 + within // 4 * 2 + within % 2
    out = dense_MN.new_full((columns.neuron.numel(), BLOCK_TOKENS), float("nan"))
    rows = block[:, None] * BLOCK_TOKENS + token
    out[:used] = padded[rows, columns.neuron[:used, None].long()]
    return out


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """Random, the same every time; NaN wherever nothing may be read."""
    is_active = pattern_of(case, device)
    columns = columns_of(is_active, case.spare)
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    def active() -> Tensor:
        return randn(case.m, case.n).masked_fill_(~is_active, float("nan"))

    up, d_up = active(), active()
    gate = randn(case.m, case.n).abs_().masked_fill_(~is_active, 0) if case.gated else None
    d_gate = active() if case.gated else None
    dense = (gate, up, d_gate, d_up)
    values = [None if matrix is None else values_of(columns, matrix) for matrix in dense]
    x_MK, dy_MK = randn(case.m, case.k), randn(case.m, case.k)
    if values[0] is not None:
        columns = columns._replace(gate=values[0])
    columns = columns._replace(up=values[1])
    return Inputs(columns, *values[2:], x_MK, dy_MK, is_active, dense)


def grads_of(
    case: Case, t: Inputs, added_to: MatrixGradients | None = None, num_nonzeros: int | None = None
) -> MatrixGradients:
    """What the kernels compute; of the weights nothing is read but their sizes."""
    w_NK = t.x_MK.new_empty(case.n, case.k)
    w = FFNWeights(w_NK if case.gated else None, w_NK, w_NK.t())
    out = added_to or MatrixGradients.empty(w, case.dtype)
    inputs = BackwardInputs(t.dy_MK, torch.zeros(()), t.x_MK, w, t.columns)
    adds = added_to is not None
    weight_grads(inputs, t.d_gate, t.d_up, out, adds=adds, num_nonzeros=num_nonzeros)
    return out


def _check_sums(actual: Tensor, values_MN: Tensor, active_MN: Tensor, rows_MK: Tensor) -> None:
    """Each element within rounding of float64's: of the result's dtype, and of fp32 sums."""
    values = values_MN.masked_fill(~active_MN, 0).double()
    expected = values.t() @ rows_MK.double()
    size = values.abs().t() @ rows_MK.double().abs()
    rounding = 2.0**-8 if actual.dtype == BF16 else 0.0
    error = (actual.double() - expected).abs()
    assert bool((error <= 1e-5 * size + rounding * expected.abs()).all()), error.max()
    assert not actual[~active_MN.any(0)].any()


def check_against_float64(case: Case, t: Inputs) -> None:
    """All gradients of one case."""
    nnz = int(t.active_MN.sum())  # no more scratch memory than that
    actual_gate, actual_up, actual_down = grads_of(case, t, num_nonzeros=nnz)
    gate, up, d_gate, d_up = t.dense
    for gradient in (actual_gate, actual_up, actual_down):
        assert gradient is None or (gradient.dtype, gradient.shape) == (
            case.dtype,
            (case.n, case.k),
        )
    _check_sums(actual_up, d_up, t.active_MN, t.x_MK)
    _check_sums(actual_down, up if gate is None else gate * up, t.active_MN, t.dy_MK)
    assert (actual_gate is None) == (d_gate is None)
    if actual_gate is not None:
        assert d_gate is not None
        _check_sums(actual_gate, d_gate, t.active_MN, t.x_MK)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@each([*CASES, *_fuzz(20)])
def test_equals_float64(case):
    t = inputs_of(case, _device())
    check_against_float64(case, t)
    if case.dtype == torch.float32:
        check_added_to_what_is_there(case, t)


def check_added_to_what_is_there(case: Case, t: Inputs) -> None:
    """The sum of both, rounded once; rows of silent neurons stay what they are."""
    gradients = grads_of(case, t)
    before = [None if g is None else torch.randn_like(g) for g in gradients]
    sums = MatrixGradients(*(None if b is None else b.clone() for b in before))
    actual = grads_of(case, t, added_to=sums)
    for total, b, g, f in zip(sums, before, gradients, actual, strict=True):
        assert f is total
        assert total is None or torch.equal(total, b + g)


@each([CASES[3], CASES[9], CASES[11]])
def test_the_same_bits_every_time(case):
    t = inputs_of(case, _device())
    first = grads_of(case, t)
    for _ in range(10):
        again = grads_of(case, t)
        for expected, actual in zip(first, again, strict=True):
            assert torch.equal(expected, actual)


def test_hot_groups_are_split_within_bounds():
    case = CASES[11]
    is_active = pattern_of(case, _device())
    groups = group_columns(columns_of(is_active), case.n, slices=1)
    unit, control = groups.arrays.tensor("unit"), groups.counters.tensor("control")
    units = unit[: int(control[0])].tolist()
    slots = [slot for *_, slot, _, parts in units if parts > 1]
    assert slots == list(range(len(slots)))
    assert 1 < len(slots) <= 60
    neurons = groups.arrays.tensor("order").long()
    assert neurons.sort().values.tolist() == list(range(case.n))
    done: dict[int, int] = {}
    for group, rows, _, pieces, first_row, *_ in units:
        assert rows == int(is_active[:, neurons[group * 32 : group * 32 + 32]].any(1).sum())
        assert first_row == 64 * done.get(group, 0)
        done[group] = done.get(group, 0) + pieces
        assert 64 * done[group] < rows + 64 or rows == 0
    assert all(64 * done[group] >= rows for group, rows, *_ in units)


def test_a_graph_follows_its_inputs():
    """Captured once; then another pattern, in the same memory, with other columns in use."""
    case, other = CASES[3]._replace(spare=30_000), Case(1000, 520, 264, 0.3)
    t, replacement = inputs_of(case, _device()), inputs_of(other, _device())
    used = int(replacement.columns.offset[-1])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grads_of(case, t)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        actual = grads_of(case, t)
    t.columns.offset.copy_(replacement.columns.offset)
    for name in ("neuron", "mask", "gate", "up"):
        getattr(t.columns, name)[:used] = getattr(replacement.columns, name)
    for gradients, new in zip(t[1:3], replacement[1:3], strict=True):
        gradients[:used] = new
    t.x_MK.copy_(replacement.x_MK)
    t.dy_MK.copy_(replacement.dy_MK)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    expected = grads_of(other, replacement)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
