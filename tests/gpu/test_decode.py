"""The kernels for up to 64 tokens, against float64 and to the bit."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpu.conditions import each, may_go_either_way, need_kernels, poisoned, relative
from gpu.union_cases import linear64
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.quantised import dequantised
from sparsellm.ffn.types import FFNWeights

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def decode():
    need_kernels()
    from sparsellm.ffn.kernels import inference

    return inference


class Case(NamedTuple):
    m: int
    k: int
    n: int
    threshold: float
    gated: bool = True
    bias: float | None = None  # the gate's mean bias; None for no biases at all
    element: torch.dtype = torch.bfloat16
    fp8: bool = False


# Threshold 100: nothing is active; a bias of 100: everything is.
CASES = [
    Case(1, 8, 8, 0.0),
    Case(2, 8, 16, 0.0, gated=False, bias=0.5),
    Case(7, 72, 264, 0.5, bias=0.5),
    Case(8, 520, 776, 1.0),
    Case(9, 1048, 1000, 0.0, gated=False),
    Case(16, 136, 5000, 1.0, bias=-1.0),
    Case(17, 264, 3000, 2.0),
    Case(33, 2056, 776, 0.0, bias=0.5),
    Case(64, 328, 1304, 1.0, gated=False, bias=0.5),
    Case(8, 64, 65536, 2.0),
    Case(64, 40, 65536, 0.0, bias=100.0),
    *(Case(m, 2048, 5632, 2.6) for m in (1, 2, 7, 8, 9, 16, 17, 33, 64)),
    *(Case(m, 4096, 14336, 2.9, bias=0.0) for m in (1, 8, 64)),
    *(Case(m, 2048, 5632, 2.6, gated=False) for m in (1, 8, 33)),
    *(Case(m, 2048, 5632, 0.0) for m in (1, 8, 64)),
    *(Case(m, 2048, 5632, 100.0, bias=0.0) for m in (1, 8, 64)),
    *(Case(m, 2048, 5632, 0.0, bias=100.0) for m in (1, 8, 16, 32, 64)),
    Case(64, 4096, 14336, 0.0, bias=100.0),
    Case(64, 4096, 14336, 0.0, gated=False, bias=100.0),
]
FP16 = [case._replace(element=torch.float16) for case in (*CASES[:11], *CASES[11::2])]
# Numbers of e4m3 are exact in either type, so the bound is the same: that of the values they are.
FP8 = [case._replace(fp8=True) for case in (*CASES, *FP16) if case.k % 16 == 0]


def problem_of(case: Case) -> tuple[Tensor, FFNWeights]:
    """Random, the same every time; everything of the case's type."""
    m, k, n = case[:3]
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return (values * scale + mean).to(case.element)

    x, up, down = randn(m, k), randn(n, k, scale=k**-0.5), randn(k, n, scale=n**-0.5)
    gate = randn(n, k, scale=k**-0.5) if case.gated else None
    b_gate = b_up = b_down = None
    if case.bias is not None:
        b_down = randn(k)
        b_up = randn(n, mean=0.0 if case.gated else case.bias)
        b_gate = randn(n, mean=case.bias) if case.gated else None
    w = FFNWeights(gate, up, down, b_gate, b_up, b_down, case.threshold)
    return x, w._replace(quantised=quantised_rows(w.first[0])) if case.fp8 else w


def run(decode, x_MK: Tensor, w: FFNWeights, observed: int = 0) -> Tensor:
    y_MK = torch.full_like(x_MK, float("nan"))
    with poisoned():
        w = w._replace(down_NK=w.down_KN.t().contiguous())
        decode.decode_ffn(x_MK, w, y_MK, observed)
    return y_MK


def expected(x_MK: Tensor, w: FFNWeights) -> tuple[Tensor, int, float]:
    """y, how many neurons are active, and the part of y that a gate next to the threshold decides.

    The gate is rounded before it meets the threshold.
    """
    first_NK, bias_N = w.first
    if w.quantised is not None:
        first_NK = dequantised(w.quantised)
    gate_MN, up_MN = linear64(x_MK, first_NK, bias_N), linear64(x_MK, w.up_NK, w.b_up_N)
    in_doubt = may_go_either_way(gate_MN, w.threshold, x_MK.dtype)
    gate_MN = gate_MN.to(x_MK.dtype).double()
    open_MN = gate_MN if w.gate_NK is None else gate_MN * up_MN
    active = gate_MN > w.threshold
    right = linear64(torch.where(active, open_MN, 0), w.down_KN, w.b_down_K)
    doubt = linear64(torch.where(in_doubt, open_MN, 0), w.down_KN, None)
    return right, int(active.any(0).sum()), float(doubt.norm() / right.norm().clamp(min=1e-30))


@each([*CASES, *FP16, *FP8])
def test_equals_float64(decode, case):
    x, w = problem_of(case)
    observed = torch.full((1,), -1, dtype=torch.int32).pin_memory()
    y = run(decode, x, w, observed.data_ptr())
    right, fire, doubt = expected(x, w)
    # Four roundings of half of it.
    assert relative(y, right) < torch.finfo(case.element).eps + doubt
    torch.cuda.synchronize()
    # A gate next to the threshold may round either way.
    margin = 0 if fire in {0, case.n} else 1 + fire // 1000
    assert abs(int(observed) - fire) <= margin


@each(
    [
        Case(m, 2048, 5632, t, fp8=fp8)
        for fp8 in (False, True)
        for m, t in zip((1, 8, 9, 33, 64) * 2, (0.0, 1.5) * 5, strict=True)
    ]
)
def test_the_same_bits_every_time(decode, case):
    x, w = problem_of(case)
    first = run(decode, x, w)
    for _ in range(10):
        assert torch.equal(run(decode, x, w), first)


@each(
    [
        Case(m, 136, 776, threshold, gated, bias=0.5)
        for m in (1, 8, 13, 50)
        for threshold in (0.0, 1.0)
        for gated in (True, False)
    ]
    + [Case(13, 144, 776, 0.0, gated, bias=0.5, fp8=True) for gated in (True, False)]
)
def test_nan_passes(decode, case):
    """A token of NaN stays one, as through a dense relu, and no other token sees it."""
    m, token = case.m, 4 if case.m == 13 else case.m - 1
    x, w = problem_of(case)
    clean = run(decode, x, w)
    x[token] = float("nan")
    y = run(decode, x, w)
    assert y[token].isnan().all()
    is_other = torch.arange(m, device=y.device) != token
    assert relative(y[is_other], clean[is_other]) < 4e-3  # other neurons, other order of sums


@each([Case(m, 2048, 5632, 2.0) for m in (1, 8, 64)])
def test_in_a_cuda_graph(decode, case):
    x, w = problem_of(case)
    w, y = w._replace(down_NK=w.down_KN.t().contiguous()), torch.empty_like(x)
    decode.decode_ffn(x, w, y)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.decode_ffn(x, w, y)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        y.fill_(float("nan"))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, run(decode, x, w))
