"""What a step's micro-batches share changes none of its gradients; tests/gpu has the kernels.

On the dense path, linear layers share as test_shared_linear.py has it.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sparsellm.ffn.shared_linear import share_weights, shared_linears
from sparsellm.ffn.step_shared import Fills, kernel_weights
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import FFNWeights

K, N, TOKENS, ROUNDS = 16, 24, 130, 3
CAPACITY = 3 * N


def begin_step(part, dtype, *, accumulate):
    """Prepares what an FFN's or a linear layer's micro-batches share."""
    fills = Fills()
    part.begin_step(dtype, accumulate=accumulate, fills=fills)
    fills.fill()


both_paths = pytest.mark.parametrize("kernels", ["sparse", "dense"])


def _ffn(gated, kernels="sparse"):
    torch.manual_seed(0)
    ffn = SparseFFN(K, N, gated=gated, kernels=kernels)
    if kernels == "dense":
        share_weights(ffn)
        assert len(shared_linears(ffn)) == 2 + gated
    return ffn


def _batches():
    torch.manual_seed(1)
    return [(torch.randn(1, TOKENS, K), torch.randn(1, TOKENS, K)) for _ in range(ROUNDS)]


def _backward(ffn, x, dy, compute):
    x = x.clone().requires_grad_()
    y, stats = compute(x, ffn.step_shared)
    ((y * dy).sum() + 0.1 * stats.l1_sum).backward()
    return x.grad


def _step(ffn, compute, *, shares):
    """The gradients of x, and of the weights after a step of several micro-batches."""
    of_x = []
    if shares:
        begin_step(ffn, torch.float32, accumulate=True)
    for index, (x, dy) in enumerate(_batches()):
        if shares and index == ROUNDS - 1:
            assert len(_sums(ffn)) == len(list(ffn.parameters()))
            ffn.end_accumulation()
            assert not _sums(ffn)
        of_x.append(_backward(ffn, x, dy, compute))
    ffn.end_step()
    assert ffn.step_shared is None
    assert all(linear.ready is None for linear in shared_linears(ffn))
    return [*of_x, *(p.grad for p in ffn.parameters())]


def _sums(ffn):
    """The memory in which a step adds up gradients."""
    if ffn.path == "sparse":
        sums = ffn.step_shared.sums or ()
    else:
        sums = [linear.sum_NK for linear in shared_linears(ffn)]
    return [total for total in sums if total is not None]


def _compute(ffn, order=None):
    capacity = CAPACITY if ffn.path == "sparse" else None
    return lambda x, shared: ffn.compute(x, capacity, order, shared)


def _views_of_one_storage(ffn):
    """Gradients as DDP keeps them: zeroed parts of a bucket."""
    flat = torch.zeros(sum(p.numel() for p in ffn.parameters()))
    parts = flat.split([p.numel() for p in ffn.parameters()])
    for p, part in zip(ffn.parameters(), parts, strict=True):
        p.grad = part.view_as(p)
    return flat


@both_paths
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("views", [True, False], ids=["gradients of DDP", "no gradients yet"])
def test_gradients_are_those_of_autograd(kernels, gated, views):
    expected, ffn = _ffn(gated, kernels), _ffn(gated, kernels)
    if views:  # they persist, and must stay the same tensors
        flat = _views_of_one_storage(ffn)
    actual = _step(ffn, _compute(ffn), shares=True)
    torch.testing.assert_close(actual, _step(expected, _compute(expected), shares=False))
    if views:
        assert all(p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in ffn.parameters())


@both_paths
def test_compiled_graphs_never_see_two_sums_in_one_storage(kernels):
    ffn = _ffn(True, kernels)
    _views_of_one_storage(ffn)
    begin_step(ffn, torch.float32, accumulate=True)
    sums = _sums(ffn)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in sums)
    assert sums[1].data_ptr() == ffn.up_proj.weight.grad.data_ptr()


class _OneFFN(nn.Module):
    def __init__(self, ffn):
        super().__init__()
        self.ffn = ffn

    def forward(self, x):
        return _compute(self.ffn)(x, self.ffn.step_shared)


@both_paths
@pytest.mark.usefixtures("process_group")
def test_ddp_may_lay_out_its_buckets_anew_within_a_step(kernels):
    """It does in the forward pass after its first backward pass, when sums have been handed out."""
    ffn, expected = _ffn(True, kernels), _ffn(True, kernels)
    # The first bucket is small: with it full, the layout changes.
    ddp = DistributedDataParallel(_OneFFN(ffn), gradient_as_bucket_view=True, bucket_cap_mb=1)
    for _ in range(3):
        before = [p.grad.data_ptr() for p in ffn.parameters() if p.grad is not None]
        begin_step(ffn, torch.float32, accumulate=True)
        for index, (x, dy) in enumerate(_batches()):
            last = index == ROUNDS - 1
            if last:
                ffn.end_accumulation()
            with nullcontext() if last else ddp.no_sync():
                y, stats = ddp(x)
                ((y * dy).sum() + 0.1 * stats.l1_sum).backward()
        ffn.end_step()
        after = [p.grad.data_ptr() for p in ffn.parameters()]
        moved = before not in ([], after)
        _step(expected, _compute(expected), shares=False)
        actual, right = ([p.grad for p in f.parameters()] for f in (ffn, expected))
        torch.testing.assert_close(actual, right)
        for p in (*ffn.parameters(), *expected.parameters()):
            p.grad.zero_()
        if moved:
            break
    assert moved, "DDP has not laid out its buckets anew: the test shows nothing"


@both_paths
def test_under_checkpointing_and_in_an_order_of_the_tokens(kernels):
    ids = torch.randint(0, 7, (1, TOKENS))
    order = token_order(ids, 8)
    expected, ffn = _ffn(True, kernels), _ffn(True, kernels)

    def recomputed(x, shared):
        return checkpoint(_compute(ffn, order), x, shared, use_reentrant=False)

    actual = _step(ffn, recomputed, shares=True)
    torch.testing.assert_close(actual, _step(expected, _compute(expected, order), shares=False))


@pytest.mark.slow
def test_compiled():
    expected, ffn = _ffn(True), _ffn(True)
    compiled = torch.compile(ffn.compute, fullgraph=True)
    actual = _step(ffn, lambda x, shared: compiled(x, CAPACITY, None, shared), shares=True)
    torch.testing.assert_close(actual, _step(expected, _compute(expected), shares=False))


def test_a_dense_layer_shares_only_where_asked_and_one_micro_batch_no_sums():
    ffn = SparseFFN(K, N, gated=True, kernels="dense")
    begin_step(ffn, torch.bfloat16, accumulate=True)
    assert ffn.step_shared is None
    assert not shared_linears(ffn)
    ffn.end_accumulation()
    ffn = _ffn(True)
    begin_step(ffn, torch.bfloat16, accumulate=False)
    assert ffn.step_shared.sums is None
    assert {w.dtype for w in ffn.step_shared.weights[:3]} == {torch.bfloat16}
    frozen = _ffn(True).requires_grad_(False)
    begin_step(frozen, torch.bfloat16, accumulate=True)
    assert frozen.step_shared.sums is None


def test_weights_for_kernels_are_contiguous_and_w_down_is_transposed():
    gate_NK, up_NK, down_KN = torch.randn(N, K), torch.randn(K, N).t(), torch.randn(K, N)
    w = FFNWeights(gate_NK, up_NK, down_KN)
    fills = Fills()
    actual = kernel_weights(w, torch.bfloat16, fills)
    fills.fill()
    assert actual.quantised is None
    ready = (actual.gate_NK, actual.up_NK, actual.down_NK)
    assert all(t.is_contiguous() for t in ready)
    assert torch.equal(actual.down_KN, actual.down_NK.t())
    for tensor, parameter in zip(ready, (gate_NK, up_NK, down_KN.t()), strict=True):
        assert torch.equal(tensor, parameter.bfloat16())
