"""`bench block`, `loss` and `idle` on CUDA: that they measure what they say, at small sizes."""

from __future__ import annotations

import pytest
import torch

from sparsellm.bench import block, gpu_idle, loss

pytestmark = pytest.mark.gpu


def test_all_sides_compute_the_same():
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 8}
    shape |= {"context_length": 2048}
    found = list(block.run([2], **shape, device=torch.device("cuda"), seconds=0.1))
    metrics = [m for measured in found for m in measured]
    differences = {
        (m.case["operation"], m.case["side"]): m.value for m in metrics if m.metric == "difference"
    }
    assert ("add_norm_ordered", "two_reductions") in differences
    assert ("linear_down", "addmm") in differences
    assert max(differences.values()) < 0.01, differences
    # A few MiB fit into L2, where a rate can exceed that of a copy of 1 GiB.
    assert all(0 < m.value < 20 for m in metrics if m.metric == "copy_rate")


def test_the_fused_loss_is_that_of_torch_and_needs_less_memory():
    pytest.importorskip("liger_kernel")
    found = loss.run(4096, 512, 32_000, torch.device("cuda"))
    by_metric = {m.metric: m for m in found}
    assert by_metric["peak_memory"].ratio > 1
    assert by_metric["fwd_bwd"].value > 0  # how fast depends on what else runs on the GPU
    assert by_metric["difference_loss"].value < 1e-4
    assert by_metric["difference_grad_x"].value < 0.02
    assert by_metric["difference_grad_w"].value < 0.02


def test_idle_time_is_a_share_of_a_step(tiny):
    recipe = tiny("train.global_batch_tokens=512", "runtime.precision=bf16")
    found, timeline = gpu_idle.run(recipe, None, warm_up_steps=2, steps=2)
    by_metric = {m.metric: m.value for m in found}
    assert 0.1 < by_metric["gpu_idle"] < 1  # a model this small waits for its host
    assert 0 < by_metric["busy"] < by_metric["step"]
    assert by_metric["busy"] <= 1.001 * sum(kernel.ms for kernel in timeline.kernels)
    assert timeline.waits  # of the host, which is slower than such small kernels
    assert by_metric["launches"] > 50
