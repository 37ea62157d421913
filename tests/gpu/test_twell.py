"""The TwELL kernels against float64, Hopper's and portable ones."""

import pytest
import torch
from ffn.twell_values import unpack_twell
from torch import Tensor

from gpu.conditions import each, may_go_either_way
from gpu.union_cases import (
    CASES,
    FP16,
    FUZZ,
    ROUNDING,
    Case,
    device,
    inputs_of,
    linear64,
    poisoned_like,
)
from sparsellm.ffn.formats import TWELL_WIDTH
from sparsellm.ffn.kernels.twell import empty_twell, gate_twell, twell_ffn
from sparsellm.ffn.types import MAX_ELL_WIDTH

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture")]
NO_NUMBER = 0x7FC0_FFFF  # a NaN of the last neuron: what a kernel fails to write shows
# Some 1,170 of a row fire, five of a tile: no tile overflows, and a list for some rows alone.
LONG_ROWS = Case(100, 64, 65_536, 2.1, None)


def gate_of(case):
    """The gate of a case in TwELL, in poisoned memory."""
    t = inputs_of(case)
    gate = empty_twell(case.m, case.n, device())
    gate.word.fill_(NO_NUMBER)
    gate.overflowed.fill_(2**30)
    gate.control.fill_(77)
    gate_twell(t.x_MK, t.weights(case.threshold), gate)
    return gate


def ffn_of(case, gate) -> tuple[Tensor, int, int]:
    """y, the rows left to dense_rows and the mean non-zeros that were observed."""
    t = inputs_of(case)
    y_MK = poisoned_like(t.x_MK)
    observed = torch.full((1,), -1, dtype=torch.int32, pin_memory=True)
    twell_ffn(gate, t.x_MK, t.weights(case.threshold), y_MK, observed.data_ptr())
    torch.cuda.synchronize()
    return y_MK, int(gate.control[0]), int(observed)


def check_packing(case, gate, exact):
    """What is active is there as far as there are slots, and all of it is counted."""
    values, count = unpack_twell(gate.word, case.n)
    is_close = (exact - case.threshold).abs() <= ROUNDING * max(case.threshold, 0.05)
    active = torch.where(is_close, values != 0, exact > case.threshold)
    tiles = count.shape[1]
    padded = torch.nn.functional.pad(active, (0, 256 * tiles - case.n)).unflatten(1, (tiles, 256))
    doubt = torch.nn.functional.pad(is_close, (0, 256 * tiles - case.n)).unflatten(1, (tiles, 256))
    assert ((count - padded.sum(2)).abs() <= doubt.sum(2)).all()
    held = (count < gate.word.shape[2])[:, :, None].expand_as(padded).flatten(1)[:, : case.n]
    right = torch.where(active & held, exact, 0)
    actual = torch.where(held, values, 0).double()
    assert float((actual - right).norm()) < 4e-3 * max(float(right.norm()), 1e-30)


@each([*CASES, LONG_ROWS, *FUZZ, *FP16])
def test_packs_what_fires_and_the_ffn_equals_float64_whatever_overflows(case):
    t = inputs_of(case)
    gate = torch.nn.functional.linear(t.x_MK, t.w_gate_NK, t.b_gate_N).double()
    exact = linear64(t.x_MK, t.w_gate_NK, t.b_gate_N)
    gate = torch.where((gate <= case.threshold) | (gate <= 0), 0, exact)
    up = linear64(t.x_MK, t.w_up_NK, t.b_up_N)
    right = linear64(gate * up, t.w_down_KN, t.b_down_K)
    in_doubt = may_go_either_way(exact, case.threshold, case.element)
    doubt = linear64(torch.where(in_doubt, exact * up, 0), t.w_down_KN, None)
    most = case.rounds(1.2e-2) * max(float(right.norm()), 1e-30) + float(doubt.norm())
    nonzeros = (gate != 0).double().sum(1)
    packed = gate_of(case)
    if case.element != torch.float16:
        check_packing(case, packed, exact)
    count = packed.word[:, :, 0].clone()
    actual, overflowed, observed = ffn_of(case, packed)
    assert torch.isfinite(actual).all()
    assert float((actual.double() - right).norm()) < most
    assert observed == pytest.approx(float(nonzeros.mean()), rel=0.01, abs=1)
    by_tile, by_list = (count >= TWELL_WIDTH).any(1), count.sum(1) > MAX_ELL_WIDTH
    assert overflowed == int((by_tile | by_list).sum())
    if case.bias == 100.0:  # all are active
        assert overflowed == case.m
    if case == LONG_ROWS:
        assert not by_tile.any()
        assert 0 < overflowed < case.m


def test_the_same_bits_every_time():
    case = Case(3000, 520, 3000, 2.0, 0.5, uneven=True)
    first, overflowed, _ = ffn_of(case, gate_of(case))
    assert 0 < overflowed < case.m
    for _ in range(10):
        assert torch.equal(ffn_of(case, gate_of(case))[0], first)
