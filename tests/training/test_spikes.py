"""Finite spikes of the loss or the gradient norm: a damaged batch is skipped, on every rank."""

import functools
import json
import math
from pathlib import Path

import pytest

from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.metrics import METRICS
from sparsellm.training.counting.counters import DECAY, SETTLED_STEPS, SkippedSteps

DAMAGED = Path(__file__).with_name("damaged_batch.py")
BAD_STEP = SETTLED_STEPS + 5
STEPS = BAD_STEP + 5
OVERRIDES = [
    f"train.steps={STEPS}",
    "train.micro_batch_size=1",
    "optimizer.learning_rate=1e-2",
    "optimizer.schedule=constant",
    "checkpoint.every_steps=30",
    "validation.every_steps=0",
]


def test_averages_are_those_of_the_steps_so_far():
    skips = SkippedSteps()
    values = [1.0 + i % 3 for i in range(50)]
    for loss in values[:-1]:
        skips.take(loss, gradient_norm=2.0)
    assert not skips.spikes({"loss": 1e9, "gradient norm": 1e9}, 2)  # too few to judge by
    skips.take(values[-1], gradient_norm=2.0)
    assert skips.spikes({"loss": 1e9, "gradient norm": 1e9}, 2)
    weights = [DECAY**i for i in reversed(range(SETTLED_STEPS))]
    losses = [w * loss for w, loss in zip(weights, values, strict=True)]
    mean = sum(losses) / sum(weights)
    assert not skips.spikes({"loss": 3 * mean * 0.999, "gradient norm": 5.999}, 3)
    [loss] = skips.spikes({"loss": 3 * mean * 1.001, "gradient norm": 5.999}, 3)
    assert loss.startswith("loss ")
    assert loss.endswith(f"times its average {mean:.4g}")
    [norm] = skips.spikes({"loss": 1.0, "gradient norm": 60.0}, 3)
    assert norm == "gradient norm 60 is 30 times its average 2"
    restored = SkippedSteps()
    restored.load_state_dict(json.loads(json.dumps(skips.state_dict())))
    assert restored.state_dict() == skips.state_dict()


def test_skipped_steps_are_counted_in_all_and_in_a_row():
    skips, counts = SkippedSteps(), []
    for accepted in (True, False, False, True, False):
        if accepted:
            skips.take(loss=1.0, gradient_norm=1.0)
        else:
            skips.skip()
        counts.append((skips.total, skips.in_a_row))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1)]
    restored = SkippedSteps()
    restored.load_state_dict(skips.state_dict())
    assert (restored.total, restored.in_a_row) == (3, 1)


@pytest.mark.long
@pytest.mark.parametrize(("number", "on_nonfinite"), [(1, "stop"), (2, "skip")])
def test_a_damaged_batch_is_skipped_and_counted(train_on, number, on_nonfinite):
    settings = [*OVERRIDES, f"train.on_nonfinite={on_nonfinite}"]
    program = (str(DAMAGED), "damage", str(number - 1), str(BAD_STEP))
    train = functools.partial(train_on, number, *settings, program=program)
    if number == 1:  # taken, it is a spike
        norms = [r["grad_norm"] for r in train("name=taken").records("train")]
        assert norms[BAD_STEP - 1] > 3 * norms[BAD_STEP - 2]
    # The averages of the first steps outlive a restart: else there would be too few to judge by.
    train("train.spike_threshold=3", f"train.steps={SETTLED_STEPS - 10}")
    done = train("train.spike_threshold=3")
    assert f"step {BAD_STEP} was skipped: " in done.stdout
    assert "(1 in all; train.spike_threshold)" in done.stdout
    assert "| 1 skipped |" in done.stdout  # the progress line goes on to say so
    train_records = done.records("train")
    steps = [r["step"] for r in train_records]
    assert steps == [step for step in range(1, STEPS + 1) if step != BAD_STEP]
    assert [r["skipped_steps"] for r in train_records[-6:]] == [0] + [1] * 5
    assert all(math.isfinite(r["grad_norm"]) for r in train_records)
    [failure] = done.records("failure")
    assert (failure["step"], failure["tokens"]) == (BAD_STEP, BAD_STEP * 256)
    assert "gradient norm " in failure["error"]
    moments = checkpoint.read_kind(done.checkpoint(STEPS), "optimizer")
    taken_steps = {float(t) for name, t in moments.items() if name.startswith("step.")}
    assert taken_steps == {STEPS - 1.0}


def test_skipped_steps_are_on_every_dashboard():
    [metric] = [metric for metric in METRICS if metric.name == "skipped_steps"]
    assert (metric.wandb, metric.section) == ("train", "training")
