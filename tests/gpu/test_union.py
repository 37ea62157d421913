"""The union kernels against float64 and to the bit: Hopper's, and the portable ones."""

import pytest
import torch

from gpu import union_cases
from gpu.conditions import each, named
from gpu.union_cases import CASES, FP16, FUZZ
from sparsellm.ffn.kernels import union as kernels
from sparsellm.ffn.kernels.gate import pack
from sparsellm.ffn.types import ELEMENTS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture")]


@each([*CASES, *FUZZ, *FP16])
def test_gate_up_and_down_equal_float64(case):
    union_cases.check_against_float64(kernels, case)


def test_the_same_bits_every_time():
    union_cases.check_the_same_bits(kernels)


@pytest.mark.parametrize("element", ELEMENTS)
def test_nan_passes(element):
    for threshold in (0.0, 1.0):
        with named(f"threshold {threshold}"):
            union_cases.check_nan_passes(kernels, threshold, element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_packing_is_exact(element):
    for threshold in (0.0, 1.5):
        for m, n in [(1, 8), (64, 256), (65, 264), (130, 776), (700, 5632)]:
            with named(m, n, threshold):
                _check_packing(m, n, threshold, element)


def _check_packing(m, n, threshold, element):
    gate = torch.randn(m, n, device="cuda").to(element)
    gate[:, torch.randperm(n)[: n // 2]] = -1.0
    special = [float("nan"), -0.0, float("inf"), float("-inf"), threshold, 0.0]
    gate[m // 2, : len(special)] = torch.tensor(special, device="cuda").to(element)
    union = union_cases.poisoned_union(m, n, element)
    pack("union", gate, threshold, union.arrays("count", "neuron", "value", "control"))
    kernels.union_entries(union)
    expected = torch.where(gate <= threshold, 0, gate).double()
    actual = union_cases.dense(union, m, n)
    assert torch.equal(actual.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))

    # Members are exactly the active neurons, in ascending order, and their zeros are +0.
    count, neuron, value, total = map(union.arrays.tensor, ("count", "neuron", "value", "total"))
    blocks, tiles = count.shape
    active = torch.zeros(blocks * 64, tiles * 256, dtype=torch.bool, device="cuda")
    active[:m, :n] = expected != 0
    active = active.view(blocks, 64, tiles, 256).any(1)
    assert torch.equal(count.long(), active.sum(2))
    member = torch.arange(256, device="cuda") < count[:, :, None]
    assert torch.equal(neuron[member].long(), active.nonzero()[:, 2])
    assert not (value[member].view(torch.int16) == -(2**15)).any()
    assert torch.equal(total.long(), count.sum(1).long())
