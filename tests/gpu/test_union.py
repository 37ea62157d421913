"""The union kernels against float64 and to the bit: Hopper's, and the portable ones."""

from __future__ import annotations

import pytest
import torch

from gpu import union_cases
from gpu.union_cases import CASES, FP16, FUZZ
from sparsellm.ffn.kernels import union as kernels
from sparsellm.ffn.types import ELEMENTS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture")]


@pytest.mark.parametrize("case", [*CASES, *FUZZ, *FP16], ids=str)
def test_gate_up_and_down_equal_float64(case):
    union_cases.check_against_float64(kernels, case)


def test_the_same_bits_every_time():
    union_cases.check_the_same_bits(kernels)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_nan_passes(threshold, element):
    union_cases.check_nan_passes(kernels, threshold, element)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("threshold", [0.0, 1.5])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (64, 256), (65, 264), (130, 776), (700, 5632)])
def test_packing_is_exact(m, n, threshold, element):
    gate = torch.randn(m, n, device="cuda").to(element)
    gate[:, torch.randperm(n)[: n // 2]] = -1.0
    special = [float("nan"), -0.0, float("inf"), float("-inf"), threshold, 0.0]
    gate[m // 2, : len(special)] = torch.tensor(special, device="cuda").to(element)
    union = union_cases.poisoned_union(m, n, element)
    kernels.pack_union(gate, threshold, union)
    expected = torch.where(gate <= threshold, 0, gate).double()
    found = union_cases.dense(union, m, n)
    assert torch.equal(found.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))

    # Members are exactly the neurons that fire, in ascending order, and their zeros are +0.
    for block, counts in enumerate(union.count.tolist()):
        fires = (expected[block * 64 : block * 64 + 64] != 0).any(0)
        for tile, count in enumerate(counts):
            members = fires[tile * 256 : tile * 256 + 256].nonzero()[:, 0]
            assert union.neuron[block, tile, :count].tolist() == members.tolist()
            bits = union.value[block, tile, :count].view(torch.int16)
            assert not (bits == -(2**15)).any()
    assert union.total.tolist() == union.count.sum(1).tolist()
