"""The operator on a GPU: fuzzed against float64 with poisoned memory, in graphs, on streams."""

import os
import random

import pytest
import torch
from torch import Tensor

from gpu.conditions import may_go_either_way, poisoned, relative
from gpu.union_cases import linear64
from sparsellm.ffn.dispatch import Dispatch
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.reference import fatrelu_ffn, rectified
from sparsellm.ffn.types import ELEMENTS, FFNWeights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sparse_kernels")]

# 2,000 before a release: SPARSELLM_FUZZ_CASES=2000.
FUZZ_CASES = int(os.environ.get("SPARSELLM_FUZZ_CASES", "50"))


def operator(x_MK: Tensor, w: FFNWeights, dispatch: int = 0) -> Tensor:
    return sparse_ffn(x_MK, w._replace(down_NK=w.down_KN.t().contiguous()), dispatch)


def expected(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """In float64; the gate is rounded before it meets the threshold, as everywhere."""
    wide = [t.double() if isinstance(t, Tensor) else t for t in w]
    if w.threshold == 0:
        return fatrelu_ffn(x_MK.double(), FFNWeights(*wide))
    first, b_first = (wide[1], wide[4]) if w.gate_NK is None else (wide[0], wide[3])
    linear = torch.nn.functional.linear
    gate_MN = linear(x_MK.double(), first, b_first).to(x_MK.dtype).double()
    gate_MN = rectified(w).value(torch.where(gate_MN <= w.threshold, 0, gate_MN))
    up_MN = linear(x_MK.double(), wide[1], wide[4])
    up_MN = torch.relu(up_MN) if w.relu_up else up_MN
    h_MN = gate_MN if w.gate_NK is None else gate_MN * up_MN
    return linear(h_MN, wide[2], wide[5])


def doubt(x_MK: Tensor, w: FFNWeights, right: Tensor) -> float:
    """The part of y that gates next to the threshold decide."""
    if w.threshold == 0:
        return 0.0
    gate = (w.up_NK, w.b_up_N) if w.gate_NK is None else (w.gate_NK, w.b_gate_N)
    gate_MN = linear64(x_MK, *gate)
    in_doubt = may_go_either_way(gate_MN, w.threshold, x_MK.dtype)
    value_MN = rectified(w).value(gate_MN)
    h_MN = value_MN if w.gate_NK is None else value_MN * linear64(x_MK, w.up_NK, w.b_up_N)
    return relative(linear64(torch.where(in_doubt, h_MN, 0), w.down_KN, None) + right, right)


def problem(
    m: int, k: int, n: int, choose: random.Random, element: torch.dtype = torch.bfloat16
) -> tuple[Tensor, FFNWeights]:
    """Fresh inputs: any density from none to all, heavy rows, silent rows and neurons, biases."""
    device = torch.device("cuda", torch.cuda.current_device())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    x_MK = normal(m, k)
    gate_NK, up_NK, down_KN = normal(n, k) / k**0.5, normal(n, k) / k**0.5, normal(k, n) / n**0.5
    b_first_N, threshold = normal(n), 0.0
    kind = choose.choice(["uniform", "neurons", "rows", "threshold", "none", "all", "plain"])
    density = choose.choice([0.0005, 0.005, 0.03, 0.2, 0.5, 0.9])
    level = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - density)))
    if kind == "uniform":
        b_first_N = torch.full((n,), -level, device=device)
    elif kind == "neurons":  # some always, most never
        b_first_N = torch.where(torch.rand(n, device=device) < density, 50.0, -50.0)
    elif kind == "rows":  # the bias silences all but rows twenty times as large as the rest
        b_first_N = torch.full((n,), -5.0, device=device)
        x_MK[torch.rand(m, device=device) < 0.05] *= 20
        x_MK[torch.rand(m, device=device) < 0.05] = 0
    elif kind == "threshold":
        threshold = max(level, 0.0)
    elif kind in ("none", "all"):
        b_first_N = torch.full((n,), 100.0 if kind == "all" else -100.0, device=device)
    gated = choose.random() < 0.7
    if kind in ("plain", "threshold") and choose.random() < 0.5:
        first_bias = None
    else:
        first_bias = b_first_N.to(element)
    b_up_N = normal(n).to(element) if choose.random() < 0.5 else None
    b_down_K = normal(k).to(element) if choose.random() < 0.5 else None
    x_MK, gate_NK, up_NK, down_KN = (t.to(element) for t in (x_MK, gate_NK, up_NK, down_KN))
    if not gated:
        return x_MK, FFNWeights(None, gate_NK, down_KN, None, first_bias, b_down_K, threshold)
    weights = (gate_NK, up_NK, down_KN)
    return x_MK, FFNWeights(
        *(*weights, first_bias, b_up_N, b_down_K), threshold, relu_up=choose.random() < 0.3
    )


def shape(choose: random.Random) -> tuple[int, int, int]:
    m = choose.choice([1, 2, 8, 17, 63, 64, 65, 128, 200, 777, 1500, 3000])
    m = choose.randint(1, m)
    k = 8 * choose.randint(1, choose.choice([1, 8, 40, 130]))
    n = 8 * choose.randint(1, choose.choice([1, 8, 64, 300]))
    return m, k, n


@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["union", "twell"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_fuzz(architecture, element, format):
    seed = int(os.environ.get("SPARSELLM_FUZZ_SEED", "0"))
    dispatch = Dispatch("sparse", pinned=True, format=format)
    worst = 0.0
    for case in range(FUZZ_CASES):
        choose = random.Random(f"{seed}/{case}")
        torch.manual_seed(choose.randrange(2**31))
        m, k, n = shape(choose)
        x_MK, w = problem(m, k, n, choose, element)
        right = expected(x_MK, w)
        with poisoned():
            actual = operator(x_MK, w, dispatch.handle)
            again = operator(x_MK, w, dispatch.handle)
        where = f"case {case}: M {m} K {k} N {n}"
        assert torch.isfinite(actual).all(), where
        assert torch.equal(actual, again), where
        # The gate, up, their product and the sum are rounded: by 2^-9 of each at most in bf16.
        most = 1.5 * torch.finfo(element).eps + doubt(x_MK, w, right)
        assert relative(actual, right) < most, f"{where}: {relative(actual, right)}"
        worst = max(worst, relative(actual, right))
    print(
        f"{format}, {element}, {architecture.name}: {FUZZ_CASES} cases, largest error {worst:.2e}"
    )


@pytest.mark.parametrize("m", [3, 500])
@pytest.mark.parametrize("gated", [True, False])
def test_nan_reaches_the_output_and_no_other_row(m, gated):
    torch.manual_seed(0)
    x_MK, w = problem(m, 256, 520, random.Random(7))
    w = w._replace(threshold=0.0, b_gate_N=None, b_up_N=None)
    if not gated:
        w = w._replace(gate_NK=None, relu_up=False)
    x_MK[1, 5] = float("nan")
    actual = operator(x_MK, w)
    assert actual[1].isnan().all()
    rest = torch.arange(m, device=x_MK.device) != 1
    if m > 64:  # a NaN column of the union times the zero of another token must not spread
        assert actual[rest].isfinite().all()


@pytest.mark.parametrize("m", [8, 2048])
def test_in_a_cuda_graph_with_new_inputs(m):
    torch.manual_seed(0)
    x_MK, w = problem(m, 512, 1024, random.Random(3))
    dispatch = Dispatch("auto", pinned=True)
    handle = dispatch.handle
    for _ in range(3):
        operator(x_MK, w, handle)
    w = w._replace(down_NK=w.down_KN.t().contiguous())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_MK = sparse_ffn(x_MK, w, handle)
    for _ in range(3):
        x_MK.copy_(torch.randn_like(x_MK))
        graph.replay()
        assert relative(y_MK, expected(x_MK, w)) < 1.2e-2


def test_on_other_streams_several_at_a_time():
    torch.manual_seed(0)
    problems = [problem(m, 512, 2048, random.Random(m)) for m in (16, 300, 1000, 2000)]
    right = [expected(x_MK, w) for x_MK, w in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        actual = []
        for (x_MK, w), stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                actual.append(operator(x_MK, w))
        torch.cuda.synchronize()
        for y_MK, expected_MK in zip(actual, right, strict=True):
            assert relative(y_MK, expected_MK) < 1.2e-2


def test_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        x_MK, w = problem(500, 512, 1024, random.Random(1))
    assert torch.cuda.current_device() == 0
    assert relative(operator(x_MK, w), expected(x_MK, w)) < 1.2e-2


def test_dispatch_runs_dense_where_all_fire_and_sparse_where_few_do():
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    m, k, n = 4096, 2048, 5632
    x_MK = torch.randn(m, k, device=device).bfloat16()
    gate_NK, up_NK = ((torch.randn(n, k, device=device) / k**0.5).bfloat16() for _ in range(2))
    down_KN = (torch.randn(k, n, device=device) / n**0.5).bfloat16()
    for bias, path in ((0.0, "dense"), (-3.0, "sparse")):
        b_N = torch.full((n,), bias, device=device, dtype=torch.bfloat16)
        w = FFNWeights(gate_NK, up_NK, down_KN, b_N, None, None, 0.0)
        dispatch = Dispatch("auto", pinned=True)
        handle = dispatch.handle
        right = expected(x_MK, w)
        for _ in range(40):  # through a probe
            actual = operator(x_MK, w, handle)
            torch.cuda.synchronize()
            assert relative(actual, right) < 1.2e-2
        assert dispatch.paths() == {4096: path}
        # Exact: what the blocks of 64 fire between them.
        active = (torch.nn.functional.linear(x_MK.float(), gate_NK.float()) + bias) > 0
        union = active.view(-1, 64, n).any(1).sum(1).double().mean()
        assert int(dispatch.observed[12]) == pytest.approx(float(union), rel=0.01)
