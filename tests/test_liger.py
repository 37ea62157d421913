"""`runtime.norm: liger` in a model, with a plain formula in place of Liger's GPU kernels."""

from __future__ import annotations

import sys

import pytest
import torch

from sparsellm import liger
from sparsellm.model import build_model, prepare_blocks
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.training.objective import Objective, total_loss


def _norm(x_MK, weight_K, eps):
    inverse_rms_M = (x_MK.float().square().mean(1) + eps).rsqrt()
    return ((x_MK * inverse_rms_M[:, None]) * weight_K).to(x_MK.dtype), inverse_rms_M


def _norm_backward(dy_MK, x_MK, weight_K, inverse_rms_M):
    normed_MK = x_MK * inverse_rms_M[:, None]
    d_weight_K = (dy_MK * normed_MK).sum(0)
    d_normed_MK = dy_MK * weight_K
    mean_M1 = (d_normed_MK * normed_MK).mean(1, keepdim=True)
    dy_MK.copy_((d_normed_MK - normed_MK * mean_M1) * inverse_rms_M[:, None])
    return d_weight_K


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    calls = []
    monkeypatch.setattr("sparsellm.model.check_liger", calls.append)
    with torch.library._scoped_library("sparsellm", "FRAGMENT") as library:
        for name, kernel in (
            ("liger_rms_norm", _norm),
            ("liger_rms_norm_backward", _norm_backward),
        ):
            torch.library.register_kernel(f"sparsellm::{name}", "cpu", kernel, lib=library)
        yield calls


def test_operators_say_what_they_return_and_overwrite(kernels_on_cpu):
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    torch.library.opcheck(liger.liger_rms_norm, (x, weight, 1e-5))
    _, inverse_rms = liger.liger_rms_norm(x, weight, 1e-5)
    given = (torch.randn(9, 64), x.detach(), weight.detach(), inverse_rms)
    torch.library.opcheck(liger.liger_rms_norm_backward, given)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_its_norms_has_the_same_loss_and_gradients(
    tiny, kernels_on_cpu, monkeypatch, compiled
):
    compile_blocks = torch.compile

    def whole(function):
        return compile_blocks(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", whole)
    recipe = tiny()
    tokens = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(0))

    def run(norm):
        runtime = RuntimeConfig(norm=norm, compile=compiled, precision="fp32")
        model = build_model(recipe, eos_token_id=256).train()
        prepare_blocks(model, runtime)
        sums = Objective(model, runtime)(tokens[:, :-1], tokens[:, 1:])
        loss = total_loss(sums, 0.1, tokens[:, 1:].numel(), 1)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    (loss, gradients), (expected, wanted) = run("liger"), run("torch")
    assert kernels_on_cpu == ["runtime.norm"]
    torch.testing.assert_close(loss, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_all_norms_are_replaced(tiny, kernels_on_cpu):
    model = build_model(tiny(), eos_token_id=256)
    prepare_blocks(model, RuntimeConfig(norm="liger", compile=False))
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    assert len(norms) == 2 * len(model.model.layers) + 1
    assert all(norm.forward.__func__ is liger._norm_forward for norm in norms)


@pytest.mark.parametrize("key", ["runtime.loss", "runtime.norm"])
def test_without_a_gpu_the_error_says_what_to_do(key):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=rf"{key}: liger needs a CUDA device; set {key}=torch"):
        liger.check_liger(key)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=r"runtime.norm: liger needs `pip install .*liger"):
        liger.check_liger("runtime.norm")


def test_a_model_with_its_norms_needs_a_gpu(tiny):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    model = build_model(tiny(), eos_token_id=256)
    with pytest.raises(ValueError, match=r"set runtime.norm=torch"):
        prepare_blocks(model, RuntimeConfig(norm="liger"))
