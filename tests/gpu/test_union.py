"""The union kernels against float64, at shapes and densities of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the union kernels need a Hopper GPU")


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def _dense(union, num_tokens: int, num_neurons: int) -> Tensor:
    """An M × N matrix of what the union format holds."""
    blocks, tiles = union.count.shape
    device = union.count.device
    place = torch.arange(64, device=device)
    within = place % 16
    token = place // 16 * 16 + within // 2 % 2 * 8 + within // 4 * 2 + within % 2
    member = torch.arange(256, device=device) < union.count[:, :, None]
    block, tile, slot = member.nonzero(as_tuple=True)
    columns = torch.zeros(len(block), 64, device=device, dtype=torch.float64)
    columns[:, token] = union.value[block, tile, slot].double()
    out = torch.zeros(blocks, 64, tiles * 256, device=device, dtype=torch.float64)
    out[block, :, tile * 256 + union.neuron[block, tile, slot].long()] = columns
    return out.view(-1, tiles * 256)[:num_tokens, :num_neurons]


def _poison(union) -> None:
    for tensor in vars(union).values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


# threshold 100: nothing fires; -0.0 and a bias of 100: everything does.
CASES = [
    # (M, K, N, threshold, bias)
    (1, 8, 8, 0.0, None),
    (64, 64, 256, 1.0, None),
    (65, 72, 264, 0.0, 0.5),
    (300, 200, 776, 1.0, 1.0),
    (1000, 2048, 5632, 0.0, None),
    (4096, 2048, 5632, 2.6, None),
    (2048, 4096, 14336, 2.8, 1.0),
    (500, 256, 1024, 100.0, None),
    (500, 256, 1024, 0.0, 100.0),
    (70000, 64, 512, 2.0, None),
]


@pytest.mark.parametrize(("m", "k", "n", "threshold", "bias"), CASES)
def test_gate_up_and_down_equal_float64(m, k, n, threshold, bias):
    from sparsellm.kernels import union as kernels

    device = torch.device("cuda", torch.cuda.current_device())

    def matrix(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).bfloat16()

    x = matrix(m, k)
    w_gate, w_up, w_down = matrix(n, k, scale=k**-0.5), matrix(n, k, scale=k**-0.5), matrix(k, n)
    b_gate = b_up = b_down = None
    if bias is not None:
        b_gate, b_up, b_down = matrix(n) + bias, matrix(n), matrix(k)

    def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())

    union = kernels.empty_union(m, n, device)
    _poison(union)
    kernels.gate_union(x, w_gate, b_gate, threshold, union)
    gate = linear(x, w_gate, b_gate)
    gate = torch.where(gate > threshold, gate, 0)
    assert _relative(_dense(union, m, n), gate) < 4e-3

    kernels.union_up(x, w_up, b_up, union)
    h = gate * linear(x, w_up, b_up)
    assert _relative(_dense(union, m, n), h) < 6e-3

    y = torch.full((m, k), float("nan"), device=device, dtype=torch.bfloat16)
    kernels.union_down(union, kernels.pack_down(w_down), b_down, y)
    assert _relative(y, linear(h, w_down, b_down)) < 8e-3


def test_the_same_bits_every_time():
    from sparsellm.kernels import union as kernels

    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(4096, 2048, device=device).bfloat16()
    w_gate, w_up = (torch.randn(5632, 2048, device=device).bfloat16() / 45 for _ in range(2))
    packed = kernels.pack_down(torch.randn(2048, 5632, device=device).bfloat16() / 45)

    def run() -> Tensor:
        union = kernels.empty_union(4096, 5632, device)
        kernels.gate_union(x, w_gate, None, 1.5, union)
        kernels.union_up(x, w_up, None, union)
        y = torch.empty_like(x)
        kernels.union_down(union, packed, None, y)
        return y

    first = run()
    for _ in range(10):
        assert torch.equal(run(), first)
