"""The operators of the hybrid format on a CPU, against those of the union format and autograd."""

import pytest
import torch
from torch.autograd import gradcheck

from sparsellm.ffn.formats import backup_rows_for
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import FFNWeights, MatrixGradients, StepShared, TokenOrder


def problem(m, k, n, gated, dtype=torch.float64):
    """x and weights whose gates stay away from zero; about a third of the neurons are active."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = normal(m, k)
    x[:, 0] = 1
    first = normal(n, k) * 0.01
    first[:, 0] = torch.where(torch.rand(n, generator=generator) < 0.3, 1.0, -1.0)
    # Tokens that are active everything.
    first[:, 1], x[:, 1] = 5, torch.where(torch.rand(m, generator=generator) < 0.2, 1.0, 0.0)
    other, down = normal(n, k), normal(k, n)
    matrices = (first, other, down) if gated else (None, first, down)
    return x.to(dtype), FFNWeights(*(None if t is None else t.to(dtype) for t in matrices))


def leaves_of(x, w):
    inputs = [t.detach().clone().requires_grad_() for t in (x, *w[:3]) if t is not None]
    rest = iter(inputs[1:])
    return inputs, FFNWeights(*(None if t is None else next(rest) for t in w[:3]))


def hybrid_ffn(x, w, width, backup_rows, order=None, shared=None):  # noqa: PLR0917
    return sparse_ffn_training(x, w, backup_rows, order, shared, "twell", width)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backup_rows", [1, 128])
def test_gradients_of_output_and_l1_in_float64(gated, backup_rows):
    x, w = problem(9, 4, 40, gated)

    def run(*tensors):
        rest = iter(tensors[1:])
        weights = FFNWeights(*(None if t is None else next(rest) for t in w[:3]))
        y, stats = hybrid_ffn(tensors[0], weights, 20, backup_rows)
        return y, stats.l1_sum

    assert gradcheck(run, leaves_of(x, w)[0])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_what_the_union_format_computes(gated, dtype):
    x, w = problem(150, 16, 96, gated, dtype)
    token = torch.randperm(150).int()
    order = TokenOrder(
        token, torch.empty(150, dtype=torch.int64).scatter_(0, token.long(), torch.arange(150))
    )
    outcomes = []
    for run in (
        lambda x, w: sparse_ffn_training(x, w, 3 * 96, order),
        lambda x, w: hybrid_ffn(x, w, 40, 8, order),
    ):
        inputs, weights = leaves_of(x, w)
        y, stats = run(inputs[0], weights)
        grads = torch.autograd.grad((y, stats.l1_sum), inputs, (torch.ones_like(y), stats.l1_sum))
        outcomes.append((y, stats, grads))
    (y, stats, grads), (other_y, other_stats, other_grads) = outcomes
    assert torch.equal(y, other_y)
    assert all(torch.equal(a, b) for a, b in zip(stats[:4], other_stats[:4], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
    heavy = int((stats.nnz_M > 40).sum())
    assert heavy > 8
    assert int(other_stats.recomputed) >= heavy - 8


def test_adds_to_the_sums_of_a_step():
    x, w = problem(70, 16, 96, gated=True, dtype=torch.float32)
    inputs, ffn_weights = leaves_of(x, w)
    y, _ = hybrid_ffn(inputs[0], ffn_weights, 40, 128)
    expected = torch.autograd.grad(y.sum(), inputs)
    sums = MatrixGradients(*(torch.ones(96, 16) for _ in range(3)))
    weights = w._replace(down_NK=w.down_KN.t().contiguous())
    inputs, ffn_weights = leaves_of(x, w)
    y, _ = hybrid_ffn(inputs[0], ffn_weights, 40, 128, None, StepShared(weights, sums))
    y.sum().backward()
    torch.testing.assert_close(inputs[0].grad, expected[0])
    torch.testing.assert_close(sums.gate_NK, expected[1] + 1)
    torch.testing.assert_close(sums.up_NK, expected[2] + 1)
    torch.testing.assert_close(sums.down_NK, expected[3].t() + 1)
    assert all(leaf.grad is None for leaf in inputs[1:])


def test_a_module_trains_on_it_compiled_and_under_autocast():
    torch.manual_seed(0)
    ffn = SparseFFN(16, 96, gated=True, kernels="sparse")
    ffn.use_format("twell", 8)
    x = torch.randn(2, 40, 16)
    capacity = ffn.capacity_for(80)
    assert capacity == backup_rows_for(80) == 128
    assert not ffn.wants_order
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = torch.compile(ffn.compute, fullgraph=True)(x, capacity)
        expected, usual = ffn.compute(x, None)
    (y.float().sum() + stats.l1_sum).backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(stats.nnz_M, usual.nnz_M)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ffn.parameters())


def test_backup_rows_are_a_sixteenth_in_whole_rounds():
    assert [backup_rows_for(m) for m in (1, 2048, 2049, 16_384, 32_768, 32_769)] == [
        *(128, 128, 256, 1024, 2048, 3072)
    ]


def test_a_width_that_cannot_be():
    x, w = problem(3, 8, 16, gated=False)
    for width in (0, 1025):
        with pytest.raises(ValueError, match="the width must be 1 to 1,024"):
            hybrid_ffn(x, w, width, 8)
    with pytest.raises(ValueError, match="format 'ell' must be one of union, twell"):
        SparseFFN(8, 16, gated=True).use_format("ell")
