"""An activation that declares `kernels` is computed as its own formula says, sparse too."""

import dataclasses
from typing import get_args

import pytest
import torch
from torch import Tensor

import sparsellm
from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import Format

K, N = 16, 96
SPARSE = [name for name, activation in ACTIVATIONS.items() if activation.kernels]


def _problem(name: str, *, gated: bool) -> tuple[SparseFFN, Tensor]:
    """Whose pre-activations go from -20 to 20, so that a bend far from zero would be seen."""
    torch.manual_seed(0)
    ffn = SparseFFN(K, N, activation=name, gated=gated, kernels="sparse").double()
    with torch.no_grad():
        ffn.pattern_weight.mul_(16)
    return ffn, torch.randn(3, 50, K, dtype=torch.float64)


def _by_formula(ffn: SparseFFN, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y; Σ|h|, and without a gate Σ relu(z); and non-zeros of each token."""
    z = x @ ffn.pattern_weight.t()
    gate = activation_function(ffn.activation)(z)
    h = gate * (x @ ffn.up_proj.weight.t()) if ffn.gated else gate
    l1 = (h if ffn.gated else z.relu()).abs().sum()
    return h @ ffn.down_proj.weight.t(), l1, (gate != 0).sum(-1).flatten().int()


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", get_args(Format))
def test_training_computes_its_formula_and_derivative(name, gated, format):
    ffn, x = _problem(name, gated=gated)
    ffn.use_format(format)
    parameters = list(ffn.parameters())
    right_y, right_l1, right_nnz = _by_formula(ffn, x)
    y, stats = ffn.forward_with_stats(x)
    assert ffn.path == "sparse"
    torch.testing.assert_close((y, stats.l1_sum), (right_y, right_l1))
    assert torch.equal(stats.nnz_M, right_nnz)
    right = torch.autograd.grad(right_y.square().sum() + right_l1, parameters)
    actual = torch.autograd.grad(y.square().sum() + stats.l1_sum, parameters)
    torch.testing.assert_close(actual, right)


def test_an_activation_states_its_inverse():
    stated = ACTIVATIONS["relu2"].kernels
    assert dataclasses.replace(stated, device_value="r * r") != stated
    with pytest.raises(ValueError, match=r"value r\*r needs inverse and device_inverse"):
        dataclasses.replace(stated, device_inverse="a")


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_inference_computes_its_formula(name, gated):
    ffn, x = _problem(name, gated=gated)
    ffn, x = ffn.bfloat16().eval(), x.bfloat16()
    assert sparsellm.accelerate(ffn, kernels="sparse").accelerated == [""]
    right = _by_formula(ffn.double(), x.double())[0]
    actual = ffn.bfloat16()(x).double()
    assert (actual - right).norm() < 1e-2 * right.norm()
