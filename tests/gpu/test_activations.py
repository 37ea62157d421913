"""The kernels of every activation but ReLU, which the other tests have, against float64."""

import random

import pytest
import torch

from gpu.conditions import poisoned, relative
from gpu.test_hybrid import check, wide, without_biases
from gpu.test_sparse_ffn import doubt, expected, problem, shape
from sparsellm.ffn.activations import RECTIFIED
from sparsellm.ffn.dispatch import Dispatch
from sparsellm.ffn.formats import FORMATS, backup_rows_for
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import ELEMENTS, BackwardInputs, FFNWeights, MatrixGradients, Room

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("architecture"),
    pytest.mark.parametrize("name", [name for name in RECTIFIED if name != "relu"]),
]
CASES = 20


@pytest.mark.parametrize("element", ELEMENTS)
def test_inference_equals_float64(name, element):
    """Decode and prefill, in both formats, and the dense product between two GEMMs."""
    for case in range(CASES):
        choose = random.Random(f"activations/{name}/{case}")
        torch.manual_seed(case)
        m, k, n = shape(choose)
        x_MK, w = problem(m, k, n, choose, element)
        w = w._replace(activation=name)
        right = expected(x_MK, w)
        identity_NN = torch.eye(len(w.up_NK), device=x_MK.device)
        h_MN = fatrelu_ffn(x_MK.double(), wide(w._replace(down_KN=identity_NN, b_down_K=None)))
        if not all(t.to(element).isfinite().all() for t in (h_MN, right)):  # fp16 ends early
            continue
        kernels, format = choose.choice(
            [("sparse", "union"), ("sparse", "twell"), ("dense", "union")]
        )
        dispatch = Dispatch(kernels, pinned=True, format=format)
        with poisoned():
            w = w._replace(down_NK=w.down_KN.t().contiguous())
            actual = sparse_ffn(x_MK, w, dispatch.handle)
        most = 2e-2 + doubt(x_MK, w, right)
        assert relative(actual, right) < most, f"case {case}: {m} × {k} × {n}, {kernels}, {format}"


def test_training_on_unions_equals_float64(name):
    for case in range(CASES):
        choose = random.Random(f"activations/{name}/union/{case}")
        torch.manual_seed(case)
        m, k, n = shape(choose)
        x_MK, w = problem(m, k, n, choose)
        x_MK, w = without_biases(x_MK, w._replace(activation=name))
        inputs = [x_MK, *(t for t in w[:3] if t is not None)]
        leaves = [t.detach().requires_grad_() for t in inputs]
        weights = iter(leaves[1:])
        of_leaves = w._replace(
            **{f: next(weights) for f in w._fields[:3] if getattr(w, f) is not None}
        )
        worst = -(-m // 64) * n
        capacity = choose.choice([worst, worst // 20])  # which may overflow
        dy_MK = torch.randn_like(x_MK)
        with poisoned():
            y_MK, stats = sparse_ffn_training(leaves[0], of_leaves, capacity)
            loss = (y_MK.float() * dy_MK.float()).sum() + 0.3 * stats.l1_sum
            actual = torch.autograd.grad(loss, leaves)
        union = FORMATS["union"]
        right_y, right_stats, saved = union.forward(x_MK.double(), wide(w), Room(worst))
        d_l1 = torch.tensor(0.3, device=x_MK.device, dtype=torch.float64)
        inputs = BackwardInputs(dy_MK.double(), d_l1, x_MK.double(), wide(w), saved)
        out = MatrixGradients.empty(inputs.w, torch.float64)
        dx_MK = union.backward(inputs, out, adds=False)
        right = (dx_MK, out.gate_NK, out.up_NK, out.down_NK.t())
        assert relative(y_MK, right_y) < 2e-2, case
        assert float(stats.l1_sum) == pytest.approx(float(right_stats.l1_sum), rel=2e-2, abs=1e-3)
        most = 2e-2 + 8e-2 / max(int(right_stats.nnz_M.sum()), 1) ** 0.5
        gradients = [t for t in right if t is not None]
        for index, (one, other) in enumerate(zip(actual, gradients, strict=True)):
            assert relative(one, other) < most, f"case {case}: {m} × {k} × {n}, gradient {index}"


def test_training_in_the_hybrid_format_equals_float64(name):
    from sparsellm.ffn.kernels import hybrid

    heavy = 0
    for case in range(CASES):
        choose = random.Random(f"activations/{name}/hybrid/{case}")
        torch.manual_seed(case)
        m, k, n = shape(choose)
        x_MK, w = problem(m, k, n, choose)
        x_MK, w = without_biases(x_MK, w._replace(activation=name))
        rows = choose.choice([backup_rows_for(m), choose.randrange(m + 1)])
        heavy += check(hybrid, x_MK, w, choose.choice([32, 128]), rows, choose=choose)
    assert heavy > 0


@pytest.mark.parametrize("format", ["union", "twell"])
def test_fp8_computes_its_own_formula(name, format):
    torch.manual_seed(0)
    m, k, n = 300, 256, 1024
    x_MK = torch.randn(m, k, device="cuda").bfloat16()
    gate_NK, up_NK = ((torch.randn(n, k, device="cuda") / k**0.5).bfloat16() for _ in range(2))
    down_KN = (torch.randn(k, n, device="cuda") / n**0.5).bfloat16()
    bias_N = torch.full((n,), -2.0, device="cuda").bfloat16()
    down_NK = down_KN.t().contiguous()
    w = FFNWeights(gate_NK, up_NK, down_KN, bias_N, activation=name, down_NK=down_NK)
    w = w._replace(quantised=quantised_rows(gate_NK))
    dispatch = Dispatch("sparse", pinned=True, format=format)
    with poisoned():
        actual = sparse_ffn(x_MK, w, dispatch.handle)
    assert relative(actual, fatrelu_ffn(x_MK, w).double()) < 2e-2
