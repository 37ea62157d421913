"""Sorting tokens on the GPU, how heavy blocks are split, and inference in another order."""

import pytest
import torch
import torch.nn.functional as F

from gpu.conditions import each, named, need_kernels, poisoned
from sparsellm.ffn.token_order import in_order, token_order
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import FFNWeights, TokenOrder

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def _normal(*shape, scale=1.0, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).bfloat16()


def _ffn(m, k, n, bias, loud=None):
    """Few neurons are active; for every ``loud``-th token all do."""
    x_MK = _normal(m, k)
    gate_NK, up_NK = (_normal(n, k, scale=k**-0.5, seed=seed) for seed in (1, 2))
    x_MK[:, -1], gate_NK[:, -1] = 1.0, bias
    if loud:
        x_MK[::loud, -1] = -4.0
    down_KN = _normal(k, n, scale=n**-0.5, seed=3)
    return x_MK, FFNWeights(gate_NK, up_NK, down_KN)


def _random_order(m):
    token_M = torch.randperm(m, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    return TokenOrder(token_M.int(), token_M.argsort())


def test_the_order_is_that_of_the_cpu():
    """By comparing all with all, and of more tokens by a sort; all ids equal, or few, or many."""
    for shape in [(1, 1), (3, 100), (1, 129), (8, 2048), (16, 2048), (32, 2048)]:
        for power in (0, 4, 40):
            with named(shape, power):
                _check_order(shape, power)


def _check_order(shape, power):
    generator = torch.Generator().manual_seed(1)
    ids_BT = (torch.rand(shape, generator=generator) ** power * 200_000).long()
    with poisoned():
        actual = token_order(ids_BT.to(DEVICE), 200_001)
    right = token_order(ids_BT, 200_001)
    assert torch.equal(actual.token_M.cpu(), right.token_M)
    assert torch.equal(actual.row_M.cpu(), right.row_M)


def test_sorting_waits_for_nothing_and_can_be_captured():
    ids_BT = torch.randint(50_304, (8, 2048), device=DEVICE)
    right = token_order(ids_BT, 50_304)
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_order(ids_BT, 50_304)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, other_ids = torch.cuda.CUDAGraph(), torch.randint(50_304, (8, 2048), device=DEVICE)
    static = ids_BT.clone()
    with torch.cuda.graph(graph):
        captured = token_order(static, 50_304)
    for ids, expected in ((other_ids, token_order(other_ids, 50_304)), (ids_BT, right)):
        static.copy_(ids)
        graph.replay()
        assert torch.equal(captured.token_M, expected.token_M)


# Of a block's first tokens all neurons are active: with 5,632 of them in several parts.
@each(
    [
        (4096, 256, 5632, -2.6, 1000),
        (1100, 1096, 5632, -3.2, 300),
        (500, 256, 2048, 5.0, None),
        (2000, 64, 5632, 5.0, None),
        (2048, 64, 1024, -100.0, None),
        (16_384, 512, 5632, -3.0, 2048),
    ]
)
@pytest.mark.usefixtures("architecture")
def test_parts_of_heavy_blocks_cover_all_members_once(case):
    from sparsellm.ffn.kernels import union
    from sparsellm.ffn.kernels.union import MAX_PARTS, splits_for

    m, k, n, bias, loud = case
    x_MK, w = _ffn(m, k, n, bias, loud)
    with poisoned():
        splits = splits_for(x_MK, n, _random_order(m).token_M)
        assert splits is not None
        gate = union.empty_union(x_MK, n, splits)
        union.gate_union(x_MK, w, gate)
    assert not gate.arrays.tensor("arrived").any()
    total, order, control = map(gate.arrays.tensor, ("total", "order", "control"))
    total, part, parts = total.tolist(), gate.arrays.tensor("split"), {}
    for word, size in order[: int(control[5])].tolist():
        block, place = word & 0xFFFF, (word & 0xFFFFFFFF) >> 16
        start, which = part[place - 1].tolist() if place else (0, 1)
        assert place <= MAX_PARTS
        parts.setdefault(block, []).append((start, size, which >> 16, which & 0xFFFF, place))
    assert sorted(parts) == list(range(len(total)))
    places = []
    for block, actual in parts.items():
        actual.sort()
        number = actual[0][3]
        assert len(actual) == number
        assert [which for _, _, which, _, _ in actual] == list(range(number))
        ends = [start + size for start, size, *_ in actual]
        assert [start for start, *_ in actual] == [0, *ends[:-1]]
        assert ends[-1] == total[block]
        if number > 1:
            places += [place for *_, place in actual]
            assert [place for *_, place in actual] == list(
                range(actual[0][4], actual[0][4] + number)
            )
    assert len(set(places)) == len(places)
    if loud:
        assert places


@pytest.mark.parametrize("path", ["gathering", "copying"])
@each([(65, 8, 8, 0.5), (1001, 264, 776, -1.0), (4096, 512, 5632, -2.8, 1000)])
def test_inference_in_an_order_equals_float64_and_repeats(architecture, monkeypatch, path, case):
    from sparsellm.ffn.kernels import inference, union

    if path == "copying":
        monkeypatch.setattr(union, "MAX_GATHERED", 0)
    x_MK, w = _ffn(*case)
    w, order = w._replace(down_NK=w.down_KN.t().contiguous()), _random_order(len(x_MK))
    with poisoned():
        actual, *again = (inference.sparse(x_MK, w, 0, order.token_M) for _ in range(4))
    gate, up, down = (t.double() for t in (w.gate_NK, w.up_NK, w.down_KN))
    x = x_MK.double()
    right = (F.relu(x @ gate.t()) * (x @ up.t())) @ down.t()
    assert float((actual.double() - right).norm() / right.norm()) < 8e-3
    assert all(torch.equal(actual, other) for other in again)


def test_training_in_an_order_through_autograd(architecture):
    """By the operators, x scattered into the order and its gradient gathered; under autocast."""
    _check_training(compiled=False)


def test_training_in_an_order_compiled():
    need_kernels()
    _check_training(compiled=True)


def _check_training(*, compiled):
    x_MK, w = _ffn(4096, 256, 5632, -2.6, 1000)
    order = _random_order(4096)
    weights = [t.float().requires_grad_() for t in (w.gate_NK, w.up_NK, w.down_KN)]
    x = x_MK.float().requires_grad_()
    dy_MK = _normal(*x_MK.shape, seed=9)

    def run(x, order):
        with torch.autocast("cuda", torch.bfloat16):
            y_MK, stats = sparse_ffn_training(x * 2, FFNWeights(*weights), 64 * 5632, order)
        return y_MK, stats.l1_sum, stats.nnz_M, stats.active_N

    if compiled:
        torch.compiler.reset()
        run = torch.compile(run, fullgraph=True)
    outcomes = []
    for ordering in (None, order, order):
        y_MK, l1_sum, nnz_M, active_N = run(x, ordering)
        loss = (y_MK * dy_MK).sum() + 0.01 * l1_sum
        gradients = torch.autograd.grad(loss, [x, *weights])
        outcomes.append((y_MK, l1_sum, nnz_M, active_N, *gradients))
    plain, ordered, repeated = outcomes
    assert all(torch.equal(a, b) for a, b in zip(ordered, repeated, strict=True))
    assert torch.equal(plain[2], ordered[2])
    assert torch.equal(plain[3], ordered[3])
    for a, b in zip(plain, ordered, strict=True):
        assert float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30)) < 6e-3


def test_in_order_on_the_gpu():
    x_MK, order = _normal(1000, 72).requires_grad_(), _random_order(1000)
    actual = in_order(x_MK, order)
    assert torch.equal(actual, x_MK[order.token_M])
    d_MK = _normal(1000, 72, seed=4)
    (gradient,) = torch.autograd.grad(actual, x_MK, d_MK)
    assert torch.equal(gradient[order.token_M], d_MK)
