"""What every family of union kernels must compute, at shapes and densities of every kind.

M tokens, K hidden_size, N intermediate_size.
"""

import random
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.union import Union, empty_union
from sparsellm.ffn.types import FFNWeights

BLOCK_TOKENS, TILE_NEURONS = 64, 256
# A gate is rounded before it meets the threshold: this near to it, it may go either way.
ROUNDING = 2.0**-7


class Case(NamedTuple):
    m: int
    k: int
    n: int
    threshold: float
    bias: float | None  # the gate's mean bias; None for no biases at all
    uneven: bool = False  # silent tokens, loud tokens, and bands of dead neurons
    element: torch.dtype = torch.bfloat16

    def rounds(self, of_bf16: float) -> float:
        """The error to expect where that of bf16 is ``of_bf16``."""
        return of_bf16 * torch.finfo(self.element).eps / torch.finfo(torch.bfloat16).eps


# Threshold 100: nothing is active; a bias of 100: everything is.
CASES = [
    Case(1, 8, 8, 0.0, None),
    Case(64, 64, 256, 1.0, None),
    Case(65, 72, 264, 0.0, 0.5),
    Case(300, 200, 776, 1.0, 1.0),
    Case(1000, 2048, 5632, 0.0, None),
    Case(4096, 2048, 5632, 2.6, None),
    Case(2048, 4096, 14336, 2.8, 1.0),
    Case(500, 256, 1024, 100.0, None),
    Case(500, 256, 1024, 0.0, 100.0),
    Case(70000, 64, 512, 2.0, None),
    Case(100, 64, 65536, 1.0, None),
    Case(64, 64, 65536, 0.0, 100.0),  # the last entry has all 32 bits set
]


def _fuzz(count: int) -> list[Case]:
    """Shapes about the edges of tiles and stages, and in between; the same ones every time."""
    draw = random.Random(0)

    def multiple_of_8(most: int) -> int:
        edge = 32 * draw.randint(1, most // 32) + draw.choice((-8, 0, 8))
        return draw.choice((edge, 8 * draw.randint(1, most // 8)))

    def case() -> Case:
        m = draw.choice((draw.randint(1, 600), 64 * draw.randint(1, 9) + draw.choice((-1, 0, 1))))
        threshold, bias = draw.choice((0.0, 0.7, 2.0, 3.5)), draw.choice((None, -1.0, 0.5))
        return Case(m, multiple_of_8(800), multiple_of_8(2600), threshold, bias, uneven=True)

    return [case() for _ in range(count)]


FUZZ = _fuzz(16)
FP16 = [case._replace(element=torch.float16) for case in (*CASES, *FUZZ[:6])]


class Inputs(NamedTuple):
    """Everything of the case's type; biases all there or all None."""

    x_MK: Tensor
    w_gate_NK: Tensor
    w_up_NK: Tensor
    w_down_KN: Tensor
    b_gate_N: Tensor | None
    b_up_N: Tensor | None
    b_down_K: Tensor | None

    def weights(self, threshold: float) -> FFNWeights:
        """Without x, as kernels take them."""
        return FFNWeights(*self[1:], threshold, down_NK=self.w_down_KN.t().contiguous())


def device() -> torch.device:
    """The current one, by index."""
    return torch.device("cuda", torch.cuda.current_device())


def inputs_of(case: Case) -> Inputs:
    """Random, the same every time."""
    m, k, n = case[:3]
    generator = torch.Generator(device()).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device(), generator=generator)

    x, w_gate, w_up = randn(m, k), randn(n, k) * k**-0.5, randn(n, k) * k**-0.5
    b_gate = b_up = b_down = None
    if case.bias is not None:
        b_gate, b_up, b_down = randn(n) + case.bias, randn(n), randn(k)
    if case.uneven:
        loudness = torch.tensor([0.0, 0.0, 1.0, 4.0], device=device())
        x *= loudness[torch.randint(4, (m, 1), device=device(), generator=generator)]
        alive = torch.randint(2, (-(-n // 96),), device=device(), generator=generator)
        alive = alive.repeat_interleave(96)[:n]
        w_gate *= alive[:, None]
        b_gate = None if b_gate is None else torch.where(alive == 1, b_gate, -1.0)
    w_down = randn(k, n) * n**-0.5  # what all neurons sum up to is far below fp16's end
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return Inputs(*(None if tensor is None else tensor.to(case.element) for tensor in tensors))


def linear64(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` in float64."""
    return torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())


def padded_dense(union: Union) -> Tensor:
    """What the union format holds, as whole blocks of tokens by whole tiles of neurons; float64."""
    count, neuron, value = map(union.arrays.tensor, ("count", "neuron", "value"))
    blocks, tiles = count.shape
    place = torch.arange(BLOCK_TOKENS, device=count.device)
    within = place % 16
    token = place // 16 * 16 + within // 2 % 2 * 8 + within // 4 * 2 + within % 2
    member = torch.arange(TILE_NEURONS, device=place.device) < count[:, :, None]
    block, tile, slot = member.nonzero(as_tuple=True)
    columns = torch.zeros(len(block), BLOCK_TOKENS, device=place.device, dtype=torch.float64)
    columns[:, token] = value[block, tile, slot].double()
    out = columns.new_zeros(blocks, BLOCK_TOKENS, tiles * TILE_NEURONS)
    out[block, :, tile * TILE_NEURONS + neuron[block, tile, slot].long()] = columns
    return out.view(-1, tiles * TILE_NEURONS)


def dense(union: Union, num_tokens: int, num_neurons: int) -> Tensor:
    """An M × N matrix of what the union format holds; nothing else may be in it."""
    padded = padded_dense(union)
    assert not padded[num_tokens:].any(), "a token past M"
    assert not padded[:, num_neurons:].any(), "a neuron past N"
    return padded[:num_tokens, :num_neurons]


def poisoned_union(
    num_tokens: int, num_neurons: int, element: torch.dtype = torch.bfloat16
) -> Union:
    """What a kernel fails to write shows."""
    union = empty_union(torch.empty(num_tokens, 0, dtype=element, device=device()), num_neurons)
    for tensor in map(union.arrays.tensor, union.arrays.layout.arrays):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    return union


def poisoned_like(tensor: Tensor) -> Tensor:
    """Likewise."""
    return torch.full_like(tensor, float("nan"))


def _relative(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    size = (expected if scale is None else scale).norm().clamp(min=1e-30)
    return float((actual.double() - expected).norm() / size)


def check_against_float64(kernels: ModuleType, case: Case) -> None:
    """Gate, up and down, each given what the one before it found."""
    m, _, n, threshold = case[:4]
    t = inputs_of(case)
    union = poisoned_union(m, n, case.element)
    kernels.gate_union(t.x_MK, t.weights(threshold), union)
    exact = linear64(t.x_MK, t.w_gate_NK, t.b_gate_N)
    gate = dense(union, m, n)
    is_close = (exact - threshold).abs() <= ROUNDING * threshold
    active = torch.where(is_close, gate != 0, exact > threshold)
    assert _relative(gate, torch.where(active, exact, 0)) < case.rounds(4e-3)

    kernels.union_up(t.x_MK, t.weights(threshold), union)
    up = linear64(t.x_MK, t.w_up_NK, None)
    b_up = torch.zeros_like(up[0]) if t.b_up_N is None else t.b_up_N.double()
    h = dense(union, m, n)
    exact_h, size = gate * (up + b_up), gate * (up.abs() + b_up.abs())
    assert _relative(h, exact_h, size) < case.rounds(6e-3)
    assert _relative(h[:, -1], exact_h[:, -1], size[:, -1]) < case.rounds(1e-2)

    y = poisoned_like(t.x_MK)
    kernels.union_down(union, t.weights(threshold), y)
    assert _relative(y, linear64(h, t.w_down_KN, t.b_down_K)) < case.rounds(4e-3)


def _run(kernels: ModuleType, t: Inputs, threshold: float) -> Tensor:
    union = poisoned_union(t.x_MK.shape[0], t.w_up_NK.shape[0], t.x_MK.dtype)
    kernels.gate_union(t.x_MK, t.weights(threshold), union)
    kernels.union_up(t.x_MK, t.weights(threshold), union)
    y = poisoned_like(t.x_MK)
    kernels.union_down(union, t.weights(threshold), y)
    return y


def check_the_same_bits(kernels: ModuleType) -> None:
    """Whichever block of threads comes first."""
    for case in (Case(4096, 2048, 5632, 1.5, None), Case(3000, 520, 3000, 2.0, 0.5, uneven=True)):
        t = inputs_of(case)
        first = _run(kernels, t, case.threshold)
        for _ in range(10):
            assert torch.equal(_run(kernels, t, case.threshold), first)


def check_nan_passes(kernels: ModuleType, threshold: float, element: torch.dtype) -> None:
    """A token of NaN stays one, as through a dense relu, and no other token sees it."""
    t = inputs_of(Case(200, 136, 776, threshold, 0.5, element=element))
    clean = _run(kernels, t, threshold)
    t.x_MK[70] = float("nan")
    y = _run(kernels, t, threshold)
    is_other = torch.arange(200, device=y.device) != 70
    assert y[70].isnan().all()
    # Other unions, other order of sums.
    assert _relative(y[is_other], clean[is_other].double()) < 4e-3

    # Times the zeros that stand for what lies past M and N, NaN and infinity are NaN.
    union = poisoned_union(200, 776, element)
    kernels.gate_union(t.x_MK, t.weights(threshold), union)
    assert dense(union, 200, 776)[70].isnan().all()
    t.w_gate_NK[7] = float("inf")
    kernels.gate_union(t.x_MK, t.weights(threshold), union)
    assert dense(union, 200, 776)[70].isnan().all()
