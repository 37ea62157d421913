"""The union kernels for Hopper against float64."""

from __future__ import annotations

import pytest

from gpu import union_cases
from gpu.conditions import need_hopper
from gpu.union_cases import CASES, FUZZ

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels():
    need_hopper()
    from sparsellm.ffn.kernels import union

    return union


@pytest.mark.parametrize("case", [*CASES, *FUZZ], ids=str)
def test_gate_up_and_down_equal_float64(kernels, case):
    union_cases.check_against_float64(kernels, case)


def test_the_same_bits_every_time(kernels):
    union_cases.check_the_same_bits(kernels)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_nan_passes(kernels, threshold):
    union_cases.check_nan_passes(kernels, threshold)
