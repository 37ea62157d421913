"""Forward and backward on the pattern against float64 autograd of the dense formula."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conditions import each, named, poisoned, relative
from sparsellm.ffn.reference import dense_of
from sparsellm.ffn.types import TOKEN_AT, BackwardInputs, FFNWeights, MatrixGradients, Room

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture")]


class Case(NamedTuple):
    """A shape; ``bias`` shifts all gates: -100 silences them, with 5 all neurons are active.

    For every ``loud``-th token all neurons are active, as for the first ones of sequences.
    """

    m: int
    k: int
    n: int
    bias: float
    gated: bool = True
    capacity: int | None = None  # columns; None holds any pattern
    loud: int | None = None


CASES = [
    Case(1, 8, 8, 1.0),
    Case(64, 64, 256, 0.0),
    Case(200, 72, 264, -1.0),
    Case(300, 2048, 5632, -2.6),
    Case(1000, 256, 1024, -2.0, gated=False),
    Case(2048, 512, 2048, -100.0),
    Case(500, 256, 512, 5.0),
    Case(700, 264, 776, -1.0, capacity=1000),  # does not fit: computed again
    Case(700, 264, 776, -1.0, gated=False, capacity=1000),
    Case(70_000, 64, 512, -1.5),
    Case(64, 64, 65_536, 5.0),
    Case(4096, 256, 5632, -2.6, loud=1000),
    Case(4096, 256, 5632, -10.0, gated=False, loud=1000),
    Case(500, 256, 2048, 5.0),  # in an order of tokens: all blocks are split
    Case(2000, 64, 5632, 5.0),  # … or none, for there is not room for all
    Case(1100, 1096, 5632, -3.2, loud=300),  # … in parts of several slices
]
LAMBDA = 0.01


def _order(case: Case, device: torch.device, ordered: bool) -> Tensor | None:
    if not ordered:
        return None
    generator = torch.Generator(device).manual_seed(7)
    return torch.randperm(case.m, generator=generator, device=device, dtype=torch.int32)


def _inputs(case: Case) -> tuple[Tensor, FFNWeights, Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(case.m + case.n)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device) * scale
        return values.bfloat16()

    x_MK, dy_MK = normal(case.m, case.k, 1.0), normal(case.m, case.k, 1.0)
    first, up_NK = (normal(case.n, case.k, case.k**-0.5) for _ in range(2))
    x_MK[:, -1], first[:, -1] = 1.0, case.bias
    if case.loud is not None:
        x_MK[:: case.loud, -1] = -4.0
    gate_NK, up_NK = (first, up_NK) if case.gated else (None, first)
    down_KN = normal(case.k, case.n, case.n**-0.5)
    down_NK = down_KN.t().contiguous()  # as the kernels read it
    return x_MK, FFNWeights(gate_NK, up_NK, down_KN, down_NK=down_NK), dy_MK


@each(CASES)
def test_equal_float64_autograd_and_repeat_to_the_bit(case):
    for ordered in (False, True):
        with named("ordered" if ordered else "as they come"):
            check(case, ordered)


def check(case: Case, ordered: bool) -> None:
    """One case: forward and backward, twice."""
    from sparsellm.ffn.kernels import union_training

    x_MK, w, dy_MK = _inputs(case)
    capacity = -(-case.m // 64) * case.n if case.capacity is None else case.capacity
    d_l1 = torch.tensor(LAMBDA, device=x_MK.device)
    token_M = _order(case, x_MK.device, ordered)
    rows_MK = x_MK if token_M is None else x_MK[token_M]
    with poisoned():
        inputs = (rows_MK, w, Room(capacity), token_M)
        (y_MK, stats, saved), (again_MK, *repeated) = (
            union_training.forward(*inputs) for _ in range(2)
        )
        assert torch.equal(again_MK, y_MK)
        inputs = BackwardInputs(dy_MK, d_l1, rows_MK, w, saved, token_M)
        actual, again = (gradients_of(inputs) for _ in range(2))
    if case.capacity is None:
        check_statistics(case, token_M, (stats, saved), repeated)

    x, up, down = (t.double().requires_grad_() for t in (x_MK, w.up_NK, w.down_KN))
    gate = None if w.gate_NK is None else w.gate_NK.double().requires_grad_()
    gate_MN = F.relu(x @ (up if gate is None else gate).t())
    h_MN = gate_MN if gate is None else gate_MN * (x @ up.t())
    y, l1 = h_MN @ down.t(), h_MN.abs().sum()
    ((y * dy_MK.double()).sum() + LAMBDA * l1).backward()

    assert relative(y_MK, y) < 8e-3
    assert float(stats.l1_sum) == pytest.approx(float(l1), rel=1e-3)
    active_MN = gate_MN != 0
    # A gate within fp32 rounding of zero may go either way.
    assert (stats.nnz_M - active_MN.sum(1)).abs().max() <= 1
    assert (stats.active_N - active_MN.sum(0)).abs().max() <= 2
    dx = x.grad if token_M is None else x.grad[token_M]
    expected = (dx, None if gate is None else gate.grad, up.grad, down.grad.t())
    for gradient, repeated, right in zip(actual, again, expected, strict=True):
        assert (gradient is None) == (right is None)
        if gradient is not None:
            assert torch.equal(gradient, repeated)
            assert relative(gradient, right) < 1e-2


def gradients_of(inputs: BackwardInputs) -> tuple[Tensor | None, ...]:
    """Of x, W_g, W_u and W_d transposed."""
    from sparsellm.ffn.kernels import union_training

    out = MatrixGradients.empty(inputs.w, torch.float32)
    return union_training.backward(inputs, out, adds=False), *out


def check_statistics(case: Case, token_M: Tensor | None, actual, again) -> None:
    """Those of the columns, which two forward passes (statistics, what is saved) find alike."""
    (l1_sum, nnz_M, active_N, union_sum, _), saved = actual
    other_stats, again = again
    blocks, used = -(-case.m // 64), int(saved.offset[-1])
    assert int(union_sum) == used
    pattern_CP = (saved.gate if case.gated else saved.up) != 0
    active_MN = dense_of(saved, pattern_CP.int(), case.m, case.n) != 0
    assert used == int(F.pad(active_MN, (0, 0, 0, -case.m % 64)).view(blocks, 64, -1).any(1).sum())
    nnz_of_rows_M = nnz_M if token_M is None else nnz_M[token_M]
    assert torch.equal(nnz_of_rows_M, active_MN.sum(1, dtype=torch.int32))
    assert torch.equal(active_N, active_MN.sum(0, dtype=torch.int32))
    bit_P = 1 << torch.tensor(TOKEN_AT, device=nnz_M.device)
    assert torch.equal(saved.mask[:used], (pattern_CP[:used] * bit_P).sum(1))
    if case.loud is not None:
        loud = (saved.offset.diff() == case.n).sum()
        assert 1 <= loud <= -(-case.m // case.loud)
        assert token_M is not None or loud == -(-case.m // case.loud)
    assert torch.equal(l1_sum, other_stats.l1_sum)
    for statistic, repeated in zip(saved[:5], again[:5], strict=True):
        rows = used if statistic is not saved.offset else None
        assert torch.equal(statistic[:rows], repeated[:rows])


@pytest.mark.parametrize("gated", [True, False])
def test_nan_stays_with_its_token(gated):
    """All its neurons are active; those past N, which a tile has, do not."""
    from sparsellm.ffn.kernels import union_training

    case = Case(200, 136, 776, -1.0, gated)
    x_MK, w, dy_MK = _inputs(case)
    x_MK[70] = float("nan")
    d_l1 = torch.tensor(LAMBDA, device=x_MK.device)
    with poisoned():
        room = Room(4 * case.n)
        y_MK, (_, nnz_M, active_N, *_), saved = union_training.forward(x_MK, w, room)
        inputs = BackwardInputs(dy_MK, d_l1, x_MK, w, saved)
        dx_MK, *_ = gradients_of(inputs)
    is_other = torch.arange(case.m, device=x_MK.device) != 70
    assert nnz_M[70] == case.n
    assert active_N.min() >= 1
    assert y_MK[70].isnan().all()
    assert y_MK[is_other].isfinite().all()
    assert dx_MK[is_other].isfinite().all()
