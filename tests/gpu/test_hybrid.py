"""Training kernels on the hybrid format against float64, whatever overflows."""

import os
import random

import pytest
import torch
from torch import Tensor

from gpu.conditions import named, poisoned, relative
from gpu.test_sparse_ffn import problem, shape
from gpu.union_cases import device
from sparsellm.ffn.formats import backup_rows_for, hybrid_of
from sparsellm.ffn.reference import activations, gradients_on, output_of
from sparsellm.ffn.types import BackwardInputs, FFNWeights, MatrixGradients, Room

pytestmark = pytest.mark.gpu

# 2,000 before a release: SPARSELLM_FUZZ_CASES=2000.
FUZZ_CASES = int(os.environ.get("SPARSELLM_FUZZ_CASES", "60"))


@pytest.fixture(autouse=True)
def kernels(architecture):
    from sparsellm.ffn.kernels import hybrid

    return hybrid


def wide(w: FFNWeights) -> FFNWeights:
    return FFNWeights(*(t.double() if isinstance(t, Tensor) else t for t in w))


def without_biases(x: Tensor, w: FFNWeights) -> tuple[Tensor, FFNWeights]:
    """The same for training: its last feature is 1, and a weight of it takes the bias's place."""
    (first, bias), x = w.first, x.clone()
    first = first.clone()
    x[:, -1], first[:, -1] = 1, 0 if bias is None else bias
    gate, up = (None, first) if w.gate_NK is None else (first, w.up_NK)
    return x, FFNWeights(gate, up, w.down_KN, activation=w.activation)


def check(kernels, x, w, width, backup_rows, *, choose):
    """Forward, the format that it keeps and backward, twice: the same bits."""
    w = w._replace(down_NK=w.down_KN.t().contiguous())
    m, n, room = len(x), len(w.up_NK), Room(backup_rows, width)
    dy, d_l1 = torch.randn_like(x), torch.tensor(0.3, device=x.device)
    token = torch.randperm(m, device=x.device).int() if choose.random() < 0.5 else None
    dtype = choose.choice([torch.float32, torch.bfloat16])
    adds = choose.random() < 0.3
    before = [torch.randn(n, x.shape[1], device=x.device) for _ in range(3)]

    def run():
        out = MatrixGradients.empty(w, torch.float32 if adds else dtype)
        for memory, start in zip(out, before, strict=True):
            if adds and memory is not None:
                memory.copy_(start)
        y, stats, saved = kernels.forward(x, w, room, token)
        inputs = BackwardInputs(dy, d_l1, x, w, saved, token)
        dx = kernels.backward(inputs, out, adds=adds)
        return y, stats, saved, (dx, *out)

    with poisoned():
        y, stats, saved, gradients = run()
        again = run()
    assert torch.equal(y, again[0])
    pairs = zip(stats, again[1], strict=True)
    assert all(a is b if a is None else torch.equal(a, b) for a, b in pairs)
    pairs = zip(gradients, again[3], strict=True)
    assert all(a is None or torch.equal(a, b) for a, b in pairs)

    gate, up = activations(x.double(), wide(w))
    if gate is not None:  # the pattern was decided by bf16 weights and fp32 sums: nearly the same
        assert abs(float(stats.nnz_M.sum()) - float((gate != 0).sum())) <= 1e-3 * gate.numel() + 2
    right_y, right = output_of(gate, up, wide(w), token)
    assert relative(y, right_y) < 1.2e-2
    assert float(stats.l1_sum) == pytest.approx(float(right.l1_sum), rel=1e-2, abs=1e-3)
    assert int(stats.nnz_M.sum()) == int(stats.active_N.sum())
    assert int(stats.union_sum) == pytest.approx(int(right.union_sum), rel=1e-2, abs=3)
    pattern = up if gate is None else gate
    expected = hybrid_of(gate, up, room)
    assert saved.num_heavy == pytest.approx(expected.num_heavy, rel=0.02, abs=2)
    assert int(saved.recomputed) == max(saved.num_heavy - backup_rows, 0)

    by_row = dy if token is None else dy[token]
    right = gradients_on(gate, up, by_row.double(), d_l1.double(), x.double(), wide(w))
    # Of few non-zeros one may be a product that nearly cancels: its rounding is then a large part.
    most = 1.5e-2 + 6e-2 / max(int((pattern != 0).sum()), 1) ** 0.5
    right = (*right[:3], right[3].t())
    names = ("x", "W_g", "W_u", "W_d")
    for name, one, other, start in zip(names, gradients, right, (0, *before), strict=True):
        if other is None:
            assert one is None
            continue
        gradient = one.double() - start if adds else one.double()
        assert relative(gradient, other) < most, name
    return saved.num_heavy


def test_fuzz(kernels, monkeypatch):
    seed, heavy = int(os.environ.get("SPARSELLM_FUZZ_SEED", "0")), 0
    for case in range(FUZZ_CASES):
        choose = random.Random(f"hybrid/{seed}/{case}")
        torch.manual_seed(choose.randrange(2**31))
        m, k, n = shape(choose)
        x, w = without_biases(*problem(m, k, n, choose))
        monkeypatch.setattr(kernels.twell, "_L2_BYTES", choose.choice([2**14, 26 * 2**20]))
        monkeypatch.setattr(kernels, "ROUND_ROWS", choose.choice([128, 1024]))
        width = choose.choice([32, 128, 512, 1024])
        rows = choose.choice([backup_rows_for(m), choose.randrange(m + 1)])
        try:
            heavy += check(kernels, x, w, width, rows, choose=choose)
        except AssertionError as failed:
            raise AssertionError(f"case {case}: M {m} K {k} N {n} W {width} R {rows}") from failed
    print(f"hybrid: {FUZZ_CASES} cases, {heavy} rows in backups")
    assert heavy > 0


def test_at_the_papers_size(kernels):
    """Nothing, a few rows, many and all of them in the backup, which is then full."""
    for density in (0.003, 0.018, 0.03, 0.5):
        with named(f"density {density}"):
            _check_at_the_papers_size(kernels, density)


def _check_at_the_papers_size(kernels, density):
    torch.manual_seed(0)
    m, k, n = 4096, 2048, 5632
    level = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - density)))
    x = torch.randn(m, k, device=device()).bfloat16()
    gate, up = ((torch.randn(n, k, device=device()) / k**0.5).bfloat16() for _ in range(2))
    down = (torch.randn(k, n, device=device()) / n**0.5).bfloat16()
    bias = torch.full((n,), -level, device=device()).bfloat16()
    x, w = without_biases(x, FFNWeights(gate, up, down, bias))
    heavy = check(kernels, x, w, 128, backup_rows_for(m), choose=random.Random(0))
    assert (heavy == 0, heavy == m) == (density == 0.003, density == 0.5)


def test_a_backup_that_ends_within_a_row_tile(kernels):
    torch.manual_seed(0)
    m, k, n = 300, 64, 1024
    x = torch.randn(m, k, device=device()).bfloat16()
    up = (torch.randn(n, k, device=device()) / k**0.5).bfloat16()
    down = (torch.randn(k, n, device=device()) / n**0.5).bfloat16()
    w = FFNWeights(None, up, down)  # half of it is active: every row is heavy
    for rows in (0, 1, 100, 200):
        with named(f"{rows} rows"):
            assert check(kernels, x, w, 128, rows, choose=random.Random(0)) == m
