"""Muon's passes over all numbers: the same bits as PyTorch's operations, at every size and type."""

import pytest
import torch
from torch import nn
from training import muon_worker

from gpu.conditions import asked_of, named, need_kernels, poisoned
from sparsellm.training.optimization import muon_passes
from sparsellm.training.optimization.muon import MuonAndAdamW

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Matrices, shape, how many numbers before the first one of each: four are 16 bytes.
CASES = [
    *((3, (2048, 512), 0), (70, (64, 72), 0), (2, (4096, 1), 0), (1, (1, 1), 0)),
    *((3, (65, 71), 0), (70, (7, 9), 1), (2, (128, 96), 2), (2, (33, 4), 3), (2, (64, 66), 4)),
]


@pytest.fixture(autouse=True)
def launched():
    """Names of the kernels that were asked for; memory is poisoned."""
    need_kernels()
    with asked_of(muon_passes) as names, poisoned():
        yield names


def _matrices(count, shape, before, seed):
    """Random; some numbers are zero, subnormal, or so large that a difference overflows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    numel = shape[0] * shape[1]
    matrices = []
    for _ in range(count):
        numbers = torch.randn(before + numel, device="cuda", generator=generator)
        kind = torch.randint(40, numbers.shape, device="cuda", generator=generator)
        for number, value in enumerate((0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38)):
            numbers[kind == number] = value
        matrices.append(numbers[before:].view(shape))
    return matrices


def _pass_both(case, momentum, refused, monkeypatch, *, by_torch):
    """Momenta, directions and weights after both passes."""
    count, shape, _ = case
    with monkeypatch.context() as patch:
        if by_torch:
            patch.setattr(muon_passes, "_kernels_take", lambda tensors: False)
        momenta, gradients, weights = (_matrices(*case, seed) for seed in range(3))
        if refused:
            gradients[0][0], gradients[-1][-1] = torch.nan, torch.inf
        updates = torch.stack(_matrices(count, shape, 0, 3)).to(BF16)
        directions = updates.new_empty(updates.shape)
        flag = torch.tensor(refused, device="cuda")
        without = count // 3  # matrices that another rank multiplies
        filled = [*([None] * without), *directions[without:]]
        muon_passes.advance_momenta(momenta, gradients, filled, momentum, flag)
        muon_passes.add_updates(weights, updates, 1 - 0.002 * 0.1, -0.002 * 18, flag)
    return *momenta, *directions[without:], *weights


def _assert_same(actual, expected):
    """To the bit, but for the sign of zero and the kind of NaN."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.3, 0.0])
def test_equal_pytorch_to_the_bit(momentum, refused, launched, monkeypatch):
    for case in CASES:
        with named(case):
            expected = _pass_both(case, momentum, refused, monkeypatch, by_torch=True)
            assert launched == []
            actual = _pass_both(case, momentum, refused, monkeypatch, by_torch=False)
            assert launched == ["advance_momenta", "add_updates"]
            launched.clear()
            _assert_same(actual, expected)


def test_a_refused_step_writes_neither_momenta_nor_weights(monkeypatch):
    for case in CASES:
        with named(case):
            momenta, _, weights = (_matrices(*case, seed) for seed in range(3))
            after = _pass_both(case, 0.95, True, monkeypatch, by_torch=False)
            _assert_same([*after[: case[0]], *after[-case[0] :]], [*momenta, *weights])
            assert all(torch.isfinite(t).all() for t in after)


def test_pytorch_takes_what_the_kernels_do_not(launched):
    ones = torch.ones(8, 8, device="cuda")
    layouts = {
        "strided": lambda matrix: matrix.repeat(1, 2)[:, ::2],
        "transposed": lambda matrix: matrix[:, :4].clone().t(),
        "bf16": lambda matrix: matrix.to(BF16),
        "float16": lambda matrix: matrix.half(),
        "empty": lambda matrix: matrix[:0],
    }
    refused = torch.tensor(False, device="cuda")
    for name, layout in layouts.items():
        with named(name):
            momentum, gradient, weight = layout(ones * 0), layout(ones * 1), layout(ones * 1)
            directions = torch.empty((1, *weight.shape), dtype=BF16, device="cuda")
            muon_passes.advance_momenta([momentum], [gradient], [directions[0]], 0.5, refused)
            muon_passes.add_updates([weight], directions, 0.5, 1.0, refused)
            for tensor, value in ((momentum, 0.5), (directions, 0.75), (weight, 1.25)):
                torch.testing.assert_close(tensor.float(), torch.full_like(tensor.float(), value))
            assert launched == []


def _weights_after(steps, shapes, monkeypatch, *, by_torch):
    """Steps of the whole optimizer, the second one refused."""
    with monkeypatch.context() as patch:
        if by_torch:
            patch.setattr(muon_passes, "_kernels_take", lambda tensors: False)
        generator = torch.Generator("cuda").manual_seed(0)
        weights = [nn.Parameter(torch.randn(s, device="cuda", generator=generator)) for s in shapes]
        vector = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = MuonAndAdamW(weights, 0.02, 0.1, torch.optim.AdamW([vector], fused=True))
        for step in range(steps):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, device="cuda", generator=generator)
                weight.grad *= torch.nan if step == 1 else 1.0
            vector.grad = torch.ones_like(vector)
            optimizer.found_inf = torch.tensor(float(step == 1), device="cuda")
            optimizer.step()
    return [weight.detach() for weight in weights]


def test_a_whole_step_has_the_bits_of_pytorchs_operations(launched, monkeypatch):
    shapes = [(256, 128), (128, 256), (256, 128), (65, 71), (7, 7)]
    expected = _weights_after(4, shapes, monkeypatch, by_torch=True)
    assert launched == []
    actual = _weights_after(4, shapes, monkeypatch, by_torch=False)
    assert set(launched) == {"advance_momenta", "add_updates"}
    _assert_same(actual, expected)


def test_a_step_comes_near_torchs_muon(launched):
    with torch.device("cuda"):
        muon_worker.check(torch.clone, "one process")
        muon_worker.check_normalized(torch.clone, "one process")
    assert launched
