"""Learning rate and L1 over the steps."""

from __future__ import annotations

import pytest

from sparsellm.recipe import OptimizerConfig, SparsityConfig
from sparsellm.training.schedule import l1_coefficient, learning_rate


def test_warm_up_then_cosine_to_the_floor():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[10] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_warm_up_begins_at_the_peak():
    assert learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 0, 5) == 1.0


def test_l1_is_zero_then_ramps_then_stays():
    config = SparsityConfig(l1_coefficient=3.0, l1_zero_steps=5, l1_ramp_steps=3)
    values = [l1_coefficient(config, step) for step in range(10)]
    assert values == pytest.approx([0, 0, 0, 0, 0, 1, 2, 3, 3, 3])
    assert l1_coefficient(SparsityConfig(l1_coefficient=3.0), 0) == 3.0
