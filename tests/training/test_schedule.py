"""Learning rate and L1 over the steps."""

import pytest

from sparsellm.recipe.sections import OptimizerConfig, SparsityConfig
from sparsellm.training.optimization.schedule import (
    decay_start,
    l1_coefficient,
    learning_rate,
    next_may_launch,
    peak_warning,
    rate_changes,
    saves_after,
)


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


def test_a_run_that_ends_during_its_warm_up_says_so(tiny):
    assert peak_warning(tiny("train.steps=9", "optimizer.warmup_steps=9")) is None
    warning = peak_warning(tiny("train.steps=9", "optimizer.warmup_steps=600"))
    assert warning == (
        "optimizer.warmup_steps 600 exceeds train.steps 9: the learning rate only reaches 2% of "
        "its peak"
    )


def test_l1_is_zero_then_ramps_then_stays():
    config = SparsityConfig(l1_coefficient=3.0, l1_zero_steps=5, l1_ramp_steps=3)
    values = [l1_coefficient(config, step) for step in range(10)]
    assert values == pytest.approx([0, 0, 0, 0, 0, 1, 2, 3, 3, 3])
    assert l1_coefficient(SparsityConfig(l1_coefficient=3.0), 0) == 3.0


def test_warm_up_stable_decay_and_constant_can_be_continued():
    wsd = OptimizerConfig(
        learning_rate=2.0, warmup_steps=10, schedule="wsd", decay_steps=20, min_lr_ratio=0.1
    )
    rates = [learning_rate(wsd, step, 100) for step in range(101)]
    assert rates[9:81] == [2.0] * 72
    assert rates[90] == pytest.approx(2.0 * 0.55)
    assert rates[100] == pytest.approx(0.2)
    assert [learning_rate(wsd, step, 1000) for step in range(81)] == rates[:81]
    tenth = wsd.model_copy(update={"decay_steps": None})
    assert learning_rate(tenth, 90, 100) == 2.0
    assert learning_rate(tenth, 95, 100) == pytest.approx(2.0 * 0.55)
    long = wsd.model_copy(update={"decay_steps": 95})  # begins where the warm-up ends
    assert learning_rate(long, 10, 100) == 2.0
    constant = wsd.model_copy(update={"schedule": "constant"})
    assert {learning_rate(constant, step, 100) for step in range(9, 200)} == {2.0}


def test_a_jump_of_the_learning_rate_is_said(tiny):
    saved = tiny("train.steps=100", "optimizer.learning_rate=1.5e-3")
    longer = tiny("train.steps=200", "optimizer.learning_rate=1.5e-3")
    assert rate_changes(saved, saved, 100) == []
    [warning] = rate_changes(saved, longer, 100)
    assert "from 3.85e-07 at step 100 to 0.000762 at the next: the cosine now ends at" in warning
    assert "optimizer.schedule=constant can be continued without a jump, and wsd from" in warning
    lower = tiny("train.steps=100", "optimizer.learning_rate=1e-3")
    [warning] = rate_changes(saved, lower, 50)
    assert warning.startswith("the learning rate changes from")
    assert "cosine" not in warning
    for schedule in ("wsd", "constant"):
        overrides = ["optimizer.learning_rate=1.5e-3", f"optimizer.schedule={schedule}"]
        before, after = tiny("train.steps=100", *overrides), tiny("train.steps=200", *overrides)
        assert rate_changes(before, after, 80) == []


def test_wsd_can_be_continued_from_the_checkpoint_before_its_decay(tiny):
    overrides = ["optimizer.schedule=wsd", "optimizer.decay_steps=20", "checkpoint.every_steps=30"]
    saved, longer = (tiny(f"train.steps={steps}", *overrides) for steps in (100, 200))
    assert decay_start(saved.optimizer, 100) == 80
    assert [step for step in range(1, 101) if saves_after(saved, step)] == [30, 60, 80, 90, 100]
    assert not next_may_launch(saved, 80)
    assert rate_changes(saved, longer, 80) == []
    [warning] = rate_changes(saved, longer, 100)
    assert warning.endswith(
        "wsd decays from step 80 on. Without a jump a new run goes on from before that: --resume "
        "…/step_00000080 --set name=NEW"
    )
    assert decay_start(tiny().optimizer, 100) is None
    never = tiny("train.steps=100", *overrides[:2], "checkpoint.every_steps=0")
    assert not any(saves_after(never, step) for step in range(1, 101))


def test_a_jump_of_the_gates_learning_rate_is_said(tiny):
    """Where it is not that of all parameters."""

    def muon(rate, gates):
        rates = [f"optimizer.learning_rate={rate}", f"optimizer.gate_learning_rate={gates}"]
        return tiny("optimizer.name=muon", "optimizer.schedule=constant", *rates)

    one, two = muon(4e-3, "null"), muon(4e-3, 1e-3)
    assert rate_changes(two, two, 50) == []
    expected = "the gates' learning rate changes from 0.0005 at step 50 to 0.001 at the next"
    assert rate_changes(one, two, 50) == [expected]
    [warning] = rate_changes(two, muon(2e-3, 1e-3), 50)
    assert warning.startswith("the learning rate changes from 0.004")
    [warning] = rate_changes(one, muon(2e-3, "null"), 50)
    assert warning.startswith("the learning rate changes from 0.004")
    assert len(rate_changes(two, muon(2e-3, "null"), 50)) == 2
