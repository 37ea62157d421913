"""A step of several micro-batches on the kernels: weights cast once, gradients added in place."""

import pytest
import torch

from gpu.conditions import poisoned
from sparsellm.ffn.step_shared import Fills
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.training_path.module import SparseFFN

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
K, N, TOKENS, ROUNDS = 264, 1544, 1500, 3


@pytest.fixture(autouse=True)
def _conditions(architecture):
    with poisoned():
        yield


def _ffn(gated):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ffn = SparseFFN(K, N, gated=gated, kernels="sparse").to(DEVICE)
    with torch.no_grad():
        ffn.pattern_weight[: N // 2] = -ffn.pattern_weight[N // 2 :].abs()  # half are silent
    return ffn


def _step(ffn, compute, *, shares):
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(0, 50, (1, TOKENS), generator=generator, device=DEVICE)
    order, tensors = token_order(ids, 64), []
    if shares:
        fills = Fills()
        ffn.begin_step(torch.bfloat16, accumulate=True, fills=fills)
        fills.fill()
    for index in range(ROUNDS):
        if shares and index == ROUNDS - 1:
            ffn.end_accumulation()
        x = torch.rand(1, TOKENS, K, generator=generator, device=DEVICE).bfloat16()
        x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y, stats = compute(x, ffn.capacity_for(TOKENS), order, ffn.step_shared)
        (y.float().square().sum() + 0.01 * stats.l1_sum).backward()
        tensors.append(x.grad)
    ffn.end_step()
    return [*tensors, *(p.grad for p in ffn.parameters())]


@pytest.mark.parametrize(("gated", "compiles"), [(True, False), (False, False), (True, True)])
def test_a_step_has_the_gradients_of_autograd(gated, compiles):
    expected, ffn = _ffn(gated), _ffn(gated)
    compute = torch.compile(ffn.compute) if compiles else ffn.compute
    actual = _step(ffn, compute, shares=True)
    right = _step(expected, expected.compute, shares=False)
    for tensor, other in zip(actual[:ROUNDS], right[:ROUNDS], strict=True):
        assert torch.equal(tensor, other)  # the same casts and kernels
    for tensor, other in zip(actual[ROUNDS:], right[ROUNDS:], strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
