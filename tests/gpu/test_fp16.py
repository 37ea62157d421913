"""What fp16 has and bf16 has not: an end at 65,504. It is reached as in a dense model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparsellm
from gpu.conditions import each
from sparsellm.ffn.dispatch import Dispatch
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.types import FFNWeights
from tests.ffn.test_accelerate_forms import FATReLU, GatedMLP, relu_gate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture")]
K, N = 136, 776
# The decode kernels, and those of a format.
TOKENS = [(3, "union"), (40, "twell"), (200, "union"), (200, "twell")]


def problem(m: int, scale: float = 1.0) -> tuple[Tensor, FFNWeights]:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    gate, up = (randn(N, K) * K**-0.5 for _ in range(2))
    weights = (tensor.half() for tensor in (gate, up, scale * randn(K, N) * N**-0.5))
    return randn(m, K).half(), FFNWeights(*weights)


def by_kernels(x_MK: Tensor, w: FFNWeights, format: str) -> Tensor:
    dispatch = Dispatch("sparse", pinned=True, format=format)
    return sparse_ffn(x_MK, w._replace(down_NK=w.down_KN.t().contiguous()), dispatch.handle)


def by_torch(x_MK: Tensor, w: FFNWeights) -> tuple[Tensor, Tensor]:
    """h and y of a dense model in fp16."""
    h_MN = F.relu(F.linear(x_MK, w.gate_NK)) * F.linear(x_MK, w.up_NK)
    return h_MN, F.linear(h_MN, w.down_KN)


@each(TOKENS)
def test_an_output_beyond_the_end_is_infinite(case):
    m, format = case
    x_MK, w = problem(m, scale=60_000.0)
    h_MN, dense_MK = by_torch(x_MK, w)
    assert h_MN.isfinite().all()
    exact_MK = F.linear(h_MN.double(), w.down_KN.double())
    y_MK = by_kernels(x_MK, w, format)
    beyond, within = exact_MK.abs() > 66_000, exact_MK.abs() < 65_000
    assert 0 < beyond.sum() < beyond.numel()
    assert torch.equal(y_MK[beyond].double(), exact_MK[beyond].sign() * torch.inf)
    assert y_MK[within].isfinite().all()
    assert torch.equal(y_MK[beyond], dense_MK[beyond])


@each(TOKENS)
def test_a_product_of_gate_and_up_beyond_the_end_spoils_its_own_token_alone(case):
    m, format = case
    x_MK, w = problem(m)
    x_MK[1] *= 2000  # gate and up are finite, most of their products are not
    h_MN, dense_MK = by_torch(x_MK, w)
    y_MK = by_kernels(x_MK, w, format)
    assert h_MN[1].isinf().any()
    assert not dense_MK[1].isfinite().any()
    assert not y_MK[1].isfinite().any()
    rest = torch.arange(m, device="cuda") != 1
    assert y_MK[rest].isfinite().all()
    torch.testing.assert_close(y_MK[rest], dense_MK[rest], rtol=5e-3, atol=5e-3)


@each(TOKENS)
def test_numbers_below_the_normal_ones_are_kept(case):
    """fp16 has subnormal ones from 6e-5 on, where a bf16 kernel may flush those of fp32."""
    m, format = case
    x_MK, w = problem(m)
    x_MK = x_MK * 2.0**-8  # h is about 2^-16
    w = w._replace(down_KN=w.down_KN * 64)
    wide = w._replace(
        gate_NK=w.gate_NK.double(), up_NK=w.up_NK.double(), down_KN=w.down_KN.double()
    )
    h_MN, dense_MK = by_torch(x_MK, w)
    assert 0 < h_MN[h_MN > 0].max() < torch.finfo(torch.float16).smallest_normal * 8
    exact_MK = by_torch(x_MK.double(), wide)[1]
    y_MK = by_kernels(x_MK, w, format)
    of_dense = float((dense_MK.double() - exact_MK).norm() / exact_MK.norm())
    of_kernels = float((y_MK.double() - exact_MK).norm() / exact_MK.norm())
    assert of_kernels < 1.2 * of_dense


@each(TOKENS)
@torch.inference_mode()
def test_a_threshold_is_met_by_what_is_rounded_to_fp16(case):
    m, format = case
    torch.manual_seed(0)
    activation = FATReLU(0.1)  # which is no fp16 number
    mlp = GatedMLP(relu_gate, activation=activation).half().cuda().eval()
    x = torch.randn(m, mlp.up_proj.in_features, device="cuda").half()
    right = mlp(x)
    done = sparsellm.accelerate(mlp, kernels="sparse", format=format)
    assert done.accelerated == [""]
    torch.testing.assert_close(mlp(x), right, rtol=5e-3, atol=5e-3)
    assert not torch.equal(right, _without_threshold(mlp, x))


def _without_threshold(mlp: GatedMLP, x: Tensor) -> Tensor:
    return F.linear(F.relu(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight)
