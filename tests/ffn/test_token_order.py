"""The order of the tokens, and that computing in it changes nothing but the unions."""

import pytest
import torch
import torch.nn.functional as F

from sparsellm.ffn.token_order import EARLY_POSITIONS, in_order, token_order
from sparsellm.ffn.training_path.module import SparseFFN


def _ids(batch=3, length=100, vocabulary=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Squared: some ids are frequent.
    return (torch.rand(batch, length, generator=generator).square() * vocabulary).long()


def test_the_key_is_early_positions_then_frequency_id_and_position():
    ids_BT = _ids()
    order = token_order(ids_BT, 50)
    flat, counts = ids_BT.flatten().tolist(), ids_BT.flatten().bincount().tolist()

    def key(token):
        return token % 100 >= EARLY_POSITIONS, counts[flat[token]], flat[token], token

    assert order.token_M.tolist() == sorted(range(300), key=key)
    assert (order.token_M.dtype, order.row_M.dtype) == (torch.int32, torch.int64)
    assert torch.equal(order.token_M.long()[order.row_M], torch.arange(300))


@pytest.mark.parametrize("ids_BT", [_ids(1, 1), _ids(4, 3), torch.zeros(2, 70, dtype=torch.int64)])
def test_any_batch_has_an_order(ids_BT):
    order = token_order(ids_BT, 50)
    assert order.token_M.sort().values.tolist() == list(range(ids_BT.numel()))


def test_ids_beyond_the_bits_of_the_key_still_make_a_permutation():
    ids_BT = torch.tensor([[2**20, 2**20 + 5, 0, 5] * 10])
    assert token_order(ids_BT, 2**20 + 6).token_M.sort().values.tolist() == list(range(40))


@pytest.mark.parametrize("compiled", [False, True])
def test_in_order_and_its_gradient(compiled):
    order = token_order(_ids(), 50)
    x_MK = torch.randn(300, 4, requires_grad=True)
    run = torch.compile(in_order, backend="aot_eager", fullgraph=True) if compiled else in_order
    actual = run(x_MK, order)
    assert torch.equal(actual, x_MK[order.token_M])
    d_MK = torch.randn(300, 4)
    (gradient,) = torch.autograd.grad(actual, x_MK, d_MK)
    assert torch.equal(gradient[order.token_M], d_MK)


@pytest.mark.parametrize("capacity", [None, 0, 100, 5 * 48])
@pytest.mark.parametrize("gated", [True, False])
def test_the_module_computes_the_same_in_any_order(gated, capacity):
    """Dense, sparse, and sparse with room for none, some and all of the pattern; in float64."""
    torch.manual_seed(0)
    ffn = SparseFFN(16, 48, gated=gated).double()
    x_BTK = torch.randn(3, 100, 16, dtype=torch.float64)
    x_BTK[..., 0] = 5.0
    with torch.no_grad():
        ffn.pattern_weight[:, 0] = -0.4  # few fire
    order = token_order(_ids(), 50)
    outcomes = []
    for chosen_order in (None, order):
        x = x_BTK.clone().requires_grad_()
        y_BTK, stats = ffn.compute(x, capacity, chosen_order)
        weights = [x, *ffn.parameters()]
        loss = (y_BTK * torch.linspace(-1, 1, 300).view(3, 100, 1)).sum() + 0.3 * stats.l1_sum
        outcomes.append((y_BTK, stats, torch.autograd.grad(loss, weights)))
    (y, stats, gradients), (y_ordered, stats_ordered, gradients_ordered) = outcomes
    torch.testing.assert_close(y_ordered, y)
    torch.testing.assert_close(gradients_ordered, gradients)
    torch.testing.assert_close(stats_ordered.l1_sum, stats.l1_sum)
    assert torch.equal(stats_ordered.nnz_M, stats.nnz_M)
    assert torch.equal(stats_ordered.active_N, stats.active_N)
    gate_MN = F.relu(F.linear(x_BTK.view(300, 16), ffn.pattern_weight))
    for token_M, stats_of in ((torch.arange(300), stats), (order.token_M, stats_ordered)):
        blocks = (gate_MN[token_M] != 0).split(64)
        assert int(stats_of.union_sum) == sum(int(block.any(0).sum()) for block in blocks)
    assert int(stats_ordered.union_sum) != int(stats.union_sum)
