"""`runtime.norm: liger` on CUDA, compiled by block as in training."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sparsellm.liger import use_liger_norm
from sparsellm.model import build_model, prepare_blocks
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.training.objective import Objective, total_loss

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_liger():
    pytest.importorskip("liger_kernel", reason="sparsellm[liger] is not installed")


def _relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(4, 96, 2048), (3, 33, 256)])
def test_norms_equal_float64(shape):
    torch.manual_seed(0)
    plain = LlamaRMSNorm(shape[-1], 1e-5).cuda()
    torch.nn.init.normal_(plain.weight, 1.0, 0.2)
    fused = copy.deepcopy(plain)
    use_liger_norm(fused)
    x, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run(norm, x):
        x = x.detach().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        y.backward(dy.to(y.dtype))
        return y.detach(), x.grad, norm.weight.grad

    found = run(fused, x)
    x_64, dy_64 = x.double().requires_grad_(), dy.double()
    weight = plain.weight.detach().double().requires_grad_()
    y_64 = weight * x_64 * (x_64.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y_64.backward(dy_64)
    assert torch.equal(dy, dy_64.to(dy.dtype))  # the gradient that was given is unchanged
    for value, expected in zip(found, (y_64, x_64.grad, weight.grad), strict=True):
        assert _relative(value, expected) < 1e-2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_bf16_is_as_near_to_float64_as_with_torchs_norms(tiny, checkpointing):
    recipe = tiny("model.hidden_size=256", "model.intermediate_size=768", "runtime.precision=bf16")
    tokens = torch.randint(257, (3, 33), device="cuda")

    def gradients(runtime, dtype):
        model = build_model(recipe, eos_token_id=256).to("cuda", dtype).train()
        prepare_blocks(model, runtime)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            sums = Objective(model, runtime)(tokens[:, :-1], tokens[:, 1:])
        total_loss(sums, 0.01, tokens[:, 1:].numel(), 1).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact = gradients(RuntimeConfig(compile=False), torch.float64)
    errors = {
        norm: _relative(
            gradients(
                RuntimeConfig(norm=norm, activation_checkpointing=checkpointing), torch.float32
            ),
            exact,
        )
        for norm in ("torch", "liger")
    }
    assert errors["liger"] < 1.2 * errors["torch"], errors
