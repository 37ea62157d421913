"""Linear layers that share a step's weight; test_step_shared.py has them in FFNs."""

import pytest
import torch
from torch import nn

from ffn.test_step_shared import begin_step
from sparsellm.ffn.shared_linear import SharedLinear, share_weights, shared_linears
from sparsellm.ffn.training_path.module import SparseFFN

K, N, ROUNDS = 16, 24, 3


def _linear():
    torch.manual_seed(0)
    return SharedLinear(nn.Parameter(torch.randn(N, K)))


def _step(linear, compute, dtype, *, shares=True):
    """Outputs, gradients of x, and the gradient of the weight after several micro-batches."""
    torch.manual_seed(1)
    tensors = []
    if shares:
        begin_step(linear, dtype, accumulate=True)
    for index in range(ROUNDS):
        if index == ROUNDS - 1:
            linear.end_accumulation()
        x, dy = torch.randn(2, 65, K, requires_grad=True), torch.randn(2, 65, N)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = compute(x)
        (y * dy).sum().backward()
        tensors += [y.detach(), x.grad]
    linear.end_step()
    assert linear.ready is linear.sum_NK is None
    gradient, linear.weight.grad = linear.weight.grad.clone(), None
    return tensors, gradient


def test_sums_of_bf16_products_are_not_rounded_to_bf16():
    linear = _linear()
    _, exact = _step(linear, linear, torch.float32, shares=False)
    usual, rounded = _step(linear, linear, torch.bfloat16, shares=False)
    actual, gradient = _step(linear, linear, torch.bfloat16)
    for tensor, other in zip(actual, usual, strict=True):
        assert torch.equal(tensor, other)  # the same casts and products
    assert gradient.dtype == torch.float32
    assert (gradient - rounded).norm() < 0.01 * exact.norm()
    assert (gradient - exact).norm() < (rounded - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype):
    total = torch.float64 if dtype == torch.float64 else torch.float32
    before, dy, x = torch.randn(5, 3, dtype=total), torch.randn(7, 5).to(dtype), torch.randn(7, 3)
    x, actual = x.to(dtype), before.clone()
    torch.ops.sparsellm.add_weight_gradient(actual, dy, x)
    exact = before.double() + dy.double().t() @ x.double()
    tolerance = 1e-12 if total == torch.float64 else 1e-5
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulates", [True, False])
def test_operators_say_what_they_return_and_overwrite(accumulates):
    x, weight = torch.randn(9, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    total = torch.zeros(6, 8) if accumulates else None
    operators = torch.ops.sparsellm
    # The gradient that goes to the sum is none of autograd's, which the last of the checks wants.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += [] if accumulates else ["test_aot_dispatch_dynamic"]
    arguments = (x, weight, [weight.detach()], total)
    torch.library.opcheck(operators.shared_linear.default, arguments, test_utils=checks)
    arguments = (torch.zeros(6, 8), torch.randn(9, 6), torch.randn(9, 8))
    torch.library.opcheck(operators.add_weight_gradient.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_two_graphs_however_many_the_steps_and_layers(dtype):
    graphs = []

    def inductor(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    torch._dynamo.reset()
    for _ in range(2):
        for linear in (_linear(), _linear()):
            _, right = _step(linear, linear, dtype, shares=False)
            linear.weight.grad = torch.zeros(2 * N, K)[N:]  # a part of a larger storage
            compiled = torch.compile(linear.forward, fullgraph=True, backend=inductor)
            _, actual = _step(linear, compiled, dtype)
            tolerance = 1e-5 if dtype == torch.float32 else 0.01
            assert (actual - right).norm() < tolerance * right.norm()
    assert len(graphs) == 2  # with a sum, and the last micro-batch's


def test_what_shares():
    frozen, half, alone = _linear(), _linear(), _linear()
    frozen.requires_grad_(False)
    half.bfloat16()
    for linear in (frozen, half):
        begin_step(linear, torch.bfloat16, accumulate=True)
        assert linear.ready is linear.sum_NK is None
        x = torch.randn(2, K, dtype=linear.weight.dtype)
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight))
    begin_step(alone, torch.bfloat16, accumulate=False)  # a step of one micro-batch
    assert alone.sum_NK is None
    assert torch.equal(alone.ready[0], alone.weight.bfloat16())
    sparse = SparseFFN(K, N, gated=True, kernels="sparse")
    share_weights(sparse)
    begin_step(sparse, torch.bfloat16, accumulate=True)  # its kernels share in their own way
    assert all(linear.ready is None for linear in shared_linears(sparse))


def test_parameters_stay_the_same_and_layers_with_a_bias_as_they_are():
    block = nn.Module()
    block.plain, block.biased = nn.Linear(K, N, bias=False), nn.Linear(K, N)
    state, parameters = block.state_dict(), list(block.parameters())
    share_weights(block)
    assert type(block.plain) is SharedLinear
    assert type(block.biased) is nn.Linear
    assert (block.plain.in_features, block.plain.out_features) == (K, N)
    assert list(block.state_dict()) == list(state)
    assert all(a is b for a, b in zip(parameters, block.parameters(), strict=True))
