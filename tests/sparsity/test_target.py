"""The controller of λ: on simulated plants, in real runs, saved, resumed, and refused."""

import itertools
import json
import math
import random
import re
import statistics

import pytest

from sparsellm.recipe.sections import SparsityConfig
from sparsellm.sparsity.target import GAIN, MAX_ERROR, TargetController


def _simulated(slope, lag, off, *, steps, noise, warmup=None):
    """Non-zeros over the target, and λ, of a plant under control.

    Non-zeros start at half of 2,816 neurons and approach ``target · λ^-slope`` within ``lag`` steps
    at the peak learning rate, which warms up and decays to zero; neighbouring steps' text makes
    noise that is correlated. λ starts a factor e^off from the right one.
    """
    rng, warmup = random.Random(0), warmup or steps // 10
    config = SparsityConfig(target_nnz=30, l1_coefficient=math.exp(off))
    controller, log_nnz, text = TargetController(config, 1, warmup), math.log(1408), 0.0
    history = []
    for step in range(steps):
        l1 = controller.l1_by_layer(step)[0]
        decay = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))
        rate = (step + 1) / warmup if step < warmup else decay
        settled = min(math.log(1408), math.log(30) - slope * math.log(l1))
        log_nnz += (settled - log_nnz) * min(1, rate / lag)
        text = 0.9 * text + rng.gauss(0, noise) * math.sqrt(1 - 0.81)
        controller.observe(step, [math.exp(log_nnz + text)])
        history.append((math.exp(log_nnz) / 30, l1))
    return history


@pytest.mark.parametrize(("steps", "noise"), [(480, 0.03), (480, 0.15), (4000, 0.1)])
def test_it_lands_within_a_tenth_and_stays_there(steps, noise):
    plants = itertools.product((0.25, 0.5, 1.0, 1.8), (5, 20, 80), (-2.3, 0, 2.3))
    for slope, lag, off in plants:
        history = _simulated(slope, lag, off, steps=steps, noise=noise)
        for begin in range(steps * 3 // 4, steps, steps // 16):
            mean = statistics.fmean(ratio for ratio, _ in history[begin : begin + steps // 16])
            assert abs(mean - 1) < (0.1 if noise < 0.1 else 0.2), (slope, lag, off, mean)
        changes = [abs(math.log(b[1] / a[1])) for a, b in itertools.pairwise(history)]
        assert max(changes) <= GAIN * MAX_ERROR * 1.001  # smooth


@pytest.mark.parametrize(("steps", "warmup", "within"), [(300, 30, 0.05), (200, 40, 0.15)])
def test_short_runs_get_there_before_the_learning_rate_is_gone(steps, warmup, within):
    """Settling for a benchmark takes 300 steps; a look-ahead of 45 steps ended 10 to 70% off."""
    for slope, lag, off in itertools.product((0.5, 1.0, 1.8), (5, 20, 40), (-0.7, 0, 0.7)):
        history = _simulated(slope, lag, off, steps=steps, noise=0.03, warmup=warmup)
        mean = statistics.fmean(ratio for ratio, _ in history[-steps // 10 :])
        assert abs(mean - 1) < within, (slope, lag, off, mean)


@pytest.mark.parametrize("slope", [0.5, 1.0])
@pytest.mark.parametrize("lag", [5, 20])
def test_a_long_warm_up_does_not_take_it_far_beyond(slope, lag):
    """As of the size recipes: 600 of 10,000 steps."""
    history = _simulated(slope, lag, 0.0, steps=10_000, noise=0.05, warmup=600)
    assert max(l1 for _, l1 in history) < 20  # the right λ is 1; without pace up to 500
    assert min(ratio for ratio, _ in history) > 0.6


def test_layers_have_their_own_and_a_dense_phase_has_none():
    config = SparsityConfig(
        target_nnz=30, l1_coefficient=1e-3, l1_zero_steps=5, target_per_layer=True
    )
    controller = TargetController(config, 3)
    for step in range(5):
        assert controller.l1_by_layer(step) == [0, 0, 0]
        controller.observe(step, [1000, 1000, 1000])  # says nothing about λ
    assert controller.l1_by_layer(5) == pytest.approx([1e-3] * 3)
    assert controller.error is None
    for step in range(5, 40):
        controller.observe(step, [300, 30, 3])
    low, same, high = controller.l1_by_layer(40)
    assert (low > 2e-3, high < 5e-4) == (True, True)
    assert same == pytest.approx(1e-3)
    assert abs(controller.error) == pytest.approx(9, rel=0.01)
    for step in range(40, 10_000):
        controller.observe(step, [0, 0, 0])  # no neuron is active
    assert controller.l1_by_layer(10_000) == pytest.approx([1e-7] * 3)


def test_a_resumed_run_moves_on_to_the_same_bits(train):
    overrides = ["sparsity.target_nnz=25", "sparsity.target_per_layer=true"]
    overrides += ["sparsity.l1_coefficient=0.01", "sparsity.l1_zero_steps=2"]
    records = []
    for name, stops in (("straight", [12]), ("halves", [6, 12])):
        for steps in stops:
            # The learning rate's decay ends at train.steps: only without decay are both the same.
            settings = [f"train.steps={steps}", f"name={name}", "optimizer.min_lr_ratio=1"]
            done = train(*overrides, *settings)
        train_records = done.records("train")
        records.append([(r["loss"], r["l1_by_layer"], r["target_error"]) for r in train_records])
    assert records[0] == records[1]
    _, by_layer, errors = zip(*records[0], strict=True)
    # The dense phase, then all where they start.
    assert by_layer[:3] == ([0, 0], [0, 0], pytest.approx([0.01, 0.01]))
    assert len(set(by_layer[-1])) == 2
    assert errors[1] is None
    assert errors[-1] != 0
    assert re.search(r"nnz .* \| ([\d.]+% (above|below)|[\d.]+×) target \| ", done.stdout)
    state = json.loads((done.checkpoint(12) / "trainer.json").read_text())
    assert [math.exp(v) for v in state["target"]["log_l1"]] != by_layer[-1]  # moved on
    # A target that the checkpoint knows nothing of begins where the recipe says.
    settings = [*overrides, "name=halves", "train.steps=13", "sparsity.target_per_layer=false"]
    assert "λ starts anew from sparsity.l1_coefficient" in train(*settings).stdout
    settings += ["train.steps=14", "sparsity.l1_coefficient=0.02"]
    done = train(*settings)
    assert "λ goes on as the controller left it" in done.stdout
    assert done.records("train")[-1]["l1_coefficient"] == pytest.approx(0.01, rel=0.07)
    # Without a target λ is the recipe's again, which may be far from where the controller left it.
    state = json.loads((done.checkpoint(14) / "trainer.json").read_text())
    (log_l1,) = state["target"]["log_l1"]
    done = train(*settings, "train.steps=15", "sparsity.target_nnz=null")
    change = f"it changes from {math.exp(log_l1):.3g} to sparsity.l1_coefficient 0.02; to hold it,"
    assert f"λ is adjusted no more: {change}" in done.stdout
    assert done.records("train")[-1]["l1_coefficient"] == 0.02


def _scheduled(target, *earlier):
    config = SparsityConfig(target_nnz=target, l1_coefficient=0.1)
    return TargetController(config, 2, earlier_targets=earlier)


def test_after_a_change_the_error_is_that_against_the_new_target():
    changing, low, high = _scheduled(30, (40, 150), (80, 60)), _scheduled(150), _scheduled(30)
    rng = random.Random(0)
    for step in range(120):
        nnz = [rng.uniform(50, 500), rng.uniform(50, 500)]
        for controller in (changing, low, high):
            controller.observe(step, nnz)
        if step < 40:
            assert changing.state_dict() == low.state_dict()
        elif step < 80:  # 60 is twice 30
            assert 1 + changing.error == pytest.approx((1 + high.error) / 2)
        else:
            assert changing.error == pytest.approx(high.error)


def test_a_target_of_the_schedule_that_is_out_of_reach_is_named():
    controller, warnings = _scheduled(10, (400, 30)), []
    for step in range(300):
        controller.observe(step, [90.0, 90.0])
        warnings += filter(None, [controller.new_warning()])
    [warning] = warnings
    assert "more than sparsity.target_schedule 30; raise the target" in warning


def test_a_schedule_resumes_at_any_step():
    rng = random.Random(0)
    nnz = [[rng.uniform(50, 500), rng.uniform(50, 500)] for _ in range(12)]
    straight = _scheduled(30, (4, 150), (8, 60))
    states = []
    for step in range(12):
        states.append(json.loads(json.dumps(straight.state_dict())))
        straight.observe(step, nnz[step])
    for stop, state in enumerate(states):
        resumed = _scheduled(30, (4, 150), (8, 60))
        resumed.load_state_dict(state)
        for step in range(stop, 12):
            resumed.observe(step, nnz[step])
        assert resumed.state_dict() == straight.state_dict()


def test_a_run_that_resumes_with_another_target_goes_on_as_if_it_had_been_the_target():
    rng = random.Random(0)
    before, resumed, always = _scheduled(30, (4, 150)), _scheduled(60), _scheduled(60)
    for step in range(6):
        nnz = [rng.uniform(50, 500), rng.uniform(50, 500)]
        before.observe(step, nnz)
        always.observe(step, nnz)
    resumed.load_state_dict(before.state_dict())
    resumed.observe(6, [100, 100])
    always.observe(6, [100, 100])
    assert resumed.error == pytest.approx(always.error)


def test_a_run_has_the_targets_of_its_shares(train):
    overrides = ["sparsity.target_nnz=5", "sparsity.l1_coefficient=0.01"]
    overrides += ["sparsity.target_schedule=[[0.25, 30], [0.75, 10]]"]
    same = _scheduled(5, (2, 30), (6, 10))
    for step, line in enumerate(train(*overrides, "train.steps=8").records("train")):
        nnz = line["sparsity"]["nnz_mean"]
        # As the smoothed errors of a controller without warm-up, whose λ alone is another one.
        same.observe(step, nnz)
        assert line["target_error"] == pytest.approx(same.error), step
    # Of twice as many steps these have been half, in which another target applies.
    done = train(*overrides, "train.steps=16")
    assert "  the target changes from 5 at step 8 to 10 at the next" in done.stdout


@pytest.mark.parametrize(
    ("nnz", "steps", "during", "at_the_end"),
    [
        (10.0, 300, "its lowest, 1e-05: even then fewer neurons are active", "-67% off"),
        (90.0, 300, "its highest, 1e.03, more than sparsity.target_nnz 30; raise", "200% off"),
        (0.0, 20, "silenced nearly all neurons.* such as 0.001 instead of 0.1", "-100% off"),
        (40.0, 20, None, "λ was still moving: train longer, .* 0.32"),
        (31.0, 300, None, None),
    ],
)
def test_what_keeps_it_from_the_target_is_said_once_and_at_the_end(nnz, steps, during, at_the_end):
    controller = TargetController(SparsityConfig(target_nnz=30, l1_coefficient=0.1), 2)
    warnings = []
    for step in range(steps):
        controller.observe(step, [nnz, nnz])
        warnings += filter(None, [controller.new_warning()])
    assert len(warnings) == (during is not None)
    assert during is None or re.search(during, warnings[0])
    final = controller.final_warning()
    assert re.search(at_the_end, final) if at_the_end else final is None


@pytest.mark.parametrize("raised", [1e-9, 100.0])
def test_another_coefficient_on_resume_leaves_lambda_where_it_was(raised):
    before = TargetController(SparsityConfig(target_nnz=30, l1_coefficient=8e-4), 2)
    before.observe(0, [30.0, 30.0])
    resumed = TargetController(SparsityConfig(target_nnz=30, l1_coefficient=raised), 2)
    assert resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed.observe(1, [30.0, 30.0])  # on the target: nothing is to change
    assert resumed.l1_by_layer(2) == pytest.approx([8e-4, 8e-4], rel=1e-12)


def test_what_was_said_is_not_said_again_after_a_resume_and_remains_the_last_warning():
    config = SparsityConfig(target_nnz=30, l1_coefficient=0.1)
    before, resumed = TargetController(config, 1), TargetController(config, 1)
    for step in range(10):
        before.observe(step, [0.0])
        before.new_warning()
    assert resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for step in range(10, 220):
        resumed.observe(step, [0.0 if step < 20 else 15.0])
        assert resumed.new_warning() is None
    assert re.search(
        "^non-zeros are -50% off .*: the initial L1 coefficient silenced", resumed.final_warning()
    )


def test_a_first_coefficient_that_silences_the_model_is_reported(train):
    overrides = ["sparsity.target_nnz=25", "sparsity.l1_coefficient=100", "train.steps=12"]
    overrides += ["validation.every_steps=0", "optimizer.learning_rate=0.01"]
    done = train(*overrides, "runtime.compile=false")
    # Once when it shows, and at the end.
    assert done.stdout.count("the initial L1 coefficient silenced nearly all neurons") == 2
    [failure] = done.records("failure")
    assert failure["what"] == "target"
    assert "lower sparsity.l1_coefficient, such as 1 instead of 1e+02" in failure["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["ffn.activation=silu"], "needs ffn.activation: relu"),
        (["sparsity.l1_coefficient=0"], "l1_coefficient to start from"),
        (["sparsity.l1_ramp_steps=3"], "set sparsity.l1_ramp_steps to 0"),
        (["sparsity.target_nnz=64"], "below model.intermediate_size 64"),
        (["sparsity.target_nnz=0.02"], "0.02 must be at least 1: it is a number of neurons, not a"),
        (["sparsity.target_schedule=[[0.5, 0.1]]"], "target_schedule 0.1 must be at least 1"),
        (["sparsity.target_nnz=null", "sparsity.target_per_layer=true"], "needs .*target_nnz"),
        (
            ["sparsity.target_nnz=null", "sparsity.target_schedule=[[0.5, 9]]"],
            "target_schedule needs sparsity.target_nnz",
        ),
        (["sparsity.target_schedule=[[0.5, 64]]"], "target_schedule 64 must be below .* 64"),
        (["sparsity.target_schedule=[[0.5, 9], [0.5, 8]]"], r"shares .* \[0.5, 0.5\] must ascend"),
        (["sparsity.target_schedule=[[1.0, 9]]"], "less than 1"),
        (["sparsity.target_schedule=[[0.5, 0]]"], "greater than 0"),
    ],
)
def test_what_cannot_be_controlled_is_refused(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        tiny("sparsity.target_nnz=5", *change)
