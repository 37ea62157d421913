"""FP8 on a CPU, in plain torch: numbers, linear layers, and sparse FFNs in both formats."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparsellm
from ffn.test_step_shared import begin_step
from sparsellm.ffn.fp8 import quantise_into, quantised_rows
from sparsellm.ffn.quantised import E4M3, QuantisedRows, dequantised, scaled_product
from sparsellm.ffn.shared_linear import SharedLinear
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import FFNWeights

M, K, N = 70, 32, 528


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class _Products(TorchDispatchMode):
    """Records the types of what FP8 products return."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        returned = function(*arguments, **(options or {}))
        if function is torch.ops.aten._scaled_mm.default:
            self.types.append(returned.dtype)
        return returned


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
def test_a_product_for_fp16_is_asked_for_in_bf16(element):
    """PyTorch's kernel writes bf16 numbers, some versions into a result that is said to be fp16."""
    with FakeTensorMode(), torch.device("cuda"):
        x, w = (
            QuantisedRows(torch.empty(rows, 64, dtype=E4M3), torch.empty(rows)) for rows in (32, 48)
        )
        with _Products() as products:
            product = scaled_product(x, w, element)
    assert products.types == [torch.bfloat16]
    assert (product.dtype, product.shape) == (element, (32, 48))


@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-20, 20),
    outlier=st.sampled_from([1.0, 1e3, 2e4]),
)
def test_a_number_is_off_by_a_sixteenth_at_most_whatever_the_scale_and_the_outlier(
    seed, exponent, outlier
):
    x = matrix(5, 64, seed=seed) * 2.0**exponent
    x[2, 7] *= outlier
    x[2, 7] += outlier * 2.0**exponent
    rows = quantised_rows(x)
    actual, largest = dequantised(rows), x.abs().amax(1, keepdim=True)
    assert rows.values_MK.float().abs().amax(1).eq(448).all()
    normal = x.abs() >= largest / 28_672  # below it, e4m3 has fewer digits
    assert ((actual - x).abs() <= x.abs() / 16 * 1.00001)[normal].all()
    assert ((actual - x).abs() <= largest / 448 * 2**-10 * 1.00001)[~normal].all()
    assert normal[[0, 1, 3, 4]].float().mean() > 0.98  # the outlier of row 2 costs others nothing


def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_row_nan():
    x = matrix(4, 16)
    x[0], x[1, 3], x[2, 5] = 0, float("inf"), float("nan")
    actual = dequantised(quantised_rows(x))
    assert (actual[0] == 0).all()
    assert actual[1:3].isnan().all()
    assert actual[3].isfinite().all()
    memory = QuantisedRows(torch.empty(4, 16, dtype=E4M3), torch.full((4,), -1.0))
    quantise_into(memory, x)
    assert torch.equal(dequantised(memory)[[0, 3]], actual[[0, 3]])
    assert dequantised(memory)[1:3].isnan().all()


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer_multiplies_e4m3_and_has_an_exact_weight_gradient(compiled, gradient):
    weight = torch.nn.Parameter(matrix(48, K, seed=1))
    layer = SharedLinear(weight, fp8=True, fp8_gradient=gradient)
    x = matrix(M, K, seed=2).requires_grad_()
    dy = matrix(M, 48, seed=3)
    y = (torch.compile(layer) if compiled else layer)(x)
    y.backward(dy)
    weight = layer.weight.detach()
    expected = dequantised(quantised_rows(x)) @ dequantised(quantised_rows(weight)).t()
    dx = dy @ weight
    if gradient:
        dx = dequantised(quantised_rows(dy)) @ dequantised(quantised_rows(weight.t())).t()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x.detach())
    exact = x.detach() @ weight.t()
    assert 0.005 < (y.detach() - exact).norm() / exact.norm() < 0.06


def test_autocast_does_not_round_e4m3_numbers_times_their_scale():
    layer = SharedLinear(torch.nn.Parameter(matrix(48, K, seed=1)), fp8=True)
    x = matrix(M, K, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    rows = quantised_rows(x.bfloat16()), quantised_rows(layer.weight.bfloat16())
    x_MK, w_NK = map(dequantised, rows)
    torch.testing.assert_close(y, (x_MK @ w_NK.t()).bfloat16(), rtol=0, atol=0)


def ffn(gated: bool) -> tuple[SparseFFN, FFNWeights]:
    module = SparseFFN(K, N, gated=gated, kernels="sparse")
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = matrix(*parameter.shape, seed=seed) / parameter.shape[1] ** 0.5
    module.use_fp8()
    return module, module._weights()


@pytest.mark.parametrize("format", ["union", "twell"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("room", ["all", "nothing"])
def test_a_sparse_ffn_computes_pattern_and_values_of_its_gate_in_fp8(format, gated, room):
    module, w = ffn(gated)
    module.use_format(format, ell_width=64)
    x = matrix(M, K, seed=7).requires_grad_()
    capacity = {"union": {"all": 2 * N, "nothing": 1}, "twell": {"all": M, "nothing": 0}}
    y, stats = module.compute(x, capacity[format][room])
    (y * matrix(M, K, seed=8)).sum().add(0.1 * stats.l1_sum).backward()

    # Straight through: the gradients are those of the exact formula at the FP8 gate's values.
    again = x.detach().requires_grad_()
    first = w.gate_NK if gated else w.up_NK
    exact = again @ first.t()
    product = dequantised(quantised_rows(again)) @ dequantised(quantised_rows(first)).t()
    gate = torch.relu(exact + (product - exact).detach())
    gate = torch.where(product > 0, exact + (product - exact).detach(), 0)
    h = gate * (again @ w.up_NK.t()) if gated else gate
    expected = h @ w.down_KN.t()
    grads = torch.autograd.grad(
        (expected * matrix(M, K, seed=8)).sum() + 0.1 * h.abs().sum(), [again, *module.parameters()]
    )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert stats.nnz_M.tolist() == (product > 0).sum(1).tolist()
    for actual, gradient in zip([x, *module.parameters()], grads, strict=True):
        torch.testing.assert_close(actual.grad, gradient, rtol=1e-4, atol=1e-4)


def test_what_a_step_shares_changes_no_bit():
    module, _ = ffn(gated=True)
    x = matrix(M, K, seed=7)
    alone = sparse_ffn_training(x, module._weights(), 2 * N, fp8=True)[0]
    begin_step(module, torch.float32, accumulate=False)
    shared = module.compute(x, 2 * N, shared=module.step_shared)[0]
    assert torch.equal(alone, shared)
    assert not torch.equal(alone, sparse_ffn_training(x, module._weights(), 2 * N)[0])


@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_accelerate_computes_in_fp8_and_follows_the_weights(gated):
    class FFN(torch.nn.Module):
        def __init__(self):
            super().__init__()
            if gated:
                self.gate_proj = torch.nn.Linear(K, N)
            self.up_proj = torch.nn.Linear(K, N)
            self.down_proj = torch.nn.Linear(N, K)

        def forward(self, x):
            h = self.gate_proj(x).relu() * self.up_proj(x) if gated else self.up_proj(x).relu()
            return self.down_proj(h)

    torch.manual_seed(0)
    model, x = FFN().bfloat16().eval(), matrix(M, K).bfloat16()
    first = model.gate_proj if gated else model.up_proj

    def expected(x: torch.Tensor = x, exact: bool = False) -> torch.Tensor:
        tokens = x.float() if exact else dequantised(quantised_rows(x))
        product = tokens @ dequantised(quantised_rows(first.weight)).t()
        gate = (product.bfloat16() + first.bias).relu()
        return model.down_proj(gate * model.up_proj(x) if gated else gate)

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sparsellm.accelerate(model, kernels="sparse", precision="fp8").accelerated == [""]
    torch.testing.assert_close(model(x), expected())
    assert not torch.equal(model(x), type(model).forward(model, x))
    first.weight.mul_(-1)
    torch.testing.assert_close(model(x), expected())
    few = x[:64]  # decoding, where tokens are not quantised
    torch.testing.assert_close(model(few), expected(few, exact=True))
    assert not torch.equal(model(few), expected(few))
    assert model.state_dict().keys() == state.keys()
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(x), expected())
    sparsellm.restore(model)
    assert not list(model.buffers())


def test_accelerate_refuses_an_unknown_precision_and_leaves_odd_sizes_alone():
    odd = torch.nn.Module()
    odd.up_proj, odd.act_fn = torch.nn.Linear(24, 72), torch.nn.ReLU()
    odd.down_proj = torch.nn.Linear(72, 24)
    odd.bfloat16()
    odd.forward = lambda x: odd.down_proj(odd.act_fn(odd.up_proj(x)))
    with pytest.raises(ValueError, match="precision 'fp4' must be one of model, fp8"):
        sparsellm.accelerate(odd, precision="fp4")
    done = sparsellm.accelerate(odd.eval(), precision="fp8")
    assert "FP8 needs multiples of 16" in done.left_alone[""]


@pytest.mark.parametrize(("k", "n"), [(24, 64), (32, 72)])
def test_sizes_that_fp8_cannot_multiply_are_refused(k, n):
    with pytest.raises(ValueError, match="multiples of 16"):
        SparseFFN(k, n, gated=True).use_fp8()
    with pytest.raises(ValueError, match="multiples of 16"):
        SharedLinear(torch.nn.Parameter(matrix(n, k)), fp8=True)
