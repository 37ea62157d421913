#!/bin/sh
# Question: a run of 100 steps resumes at step 90. The new program makes the optimizer and loads its state, makes the
#   schedule and loads its state. Does it matter whether the schedule is made before or after the optimizer's state is
#   loaded?
# Guess: no. Both states are complete, and whatever a new schedule sets is overwritten when its state is loaded.
# Seen (torch 2.13.0): it does. A schedule's state has no say over the optimizer's rate, and a new schedule changes the rate
#   once, as if the run began. Made before, that is undone by the optimizer's state. Made after, it stays: with LambdaLR, as
#   all schedules of transformers are, the next step has the rate of step 0, here 41 times too high. With a linear warm-up
#   (LinearLR) from a hundredth, the rate stays at a hundredth until the end of the run. With SequentialLR of this warm-up
#   and a cosine, it is a third of what it should be, at each of the steps. CosineAnnealingLR, PolynomialLR and
#   ExponentialLR do not care. There is no message.
# Hurts: resumed runs, and only some of them: one step at the peak rate late in a run is a spike of the loss, and a rate
#   that is too small by a constant factor is seen by nobody. Make the schedule first, then load both states.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import copy
import math

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    PolynomialLR,
    SequentialLR,
)

STEPS, RESUME = 100, 90
SCHEDULES = {
    "LambdaLR, cosine": lambda o: LambdaLR(o, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2),
    "LinearLR, warm-up": lambda o: LinearLR(o, start_factor=0.01, total_iters=10),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.01, total_iters=10), CosineAnnealingLR(o, 90)], [10]),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, STEPS),
    "PolynomialLR": lambda o: PolynomialLR(o, STEPS),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.95),
}


def make_optimizer():
    return torch.optim.AdamW([torch.ones(1, requires_grad=True)], lr=1.0)


def train(optimizer, schedule, steps, save_at=None):
    """The rates of some steps, and the states before step `save_at`."""
    rates, states = [], None
    for step in range(steps):
        if step == save_at:
            states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates, states


ratios = {}
for name, make_schedule in SCHEDULES.items():
    optimizer = make_optimizer()
    rates, (optimizer_state, schedule_state) = train(optimizer, make_schedule(optimizer), STEPS, save_at=RESUME)
    for order in ("before", "after"):
        optimizer = make_optimizer()
        if order == "before":
            schedule = make_schedule(optimizer)
        optimizer.load_state_dict(optimizer_state)
        if order == "after":
            schedule = make_schedule(optimizer)
        schedule.load_state_dict(schedule_state)
        resumed, _ = train(optimizer, schedule, STEPS - RESUME)
        ratios[name, order] = [seen / right for seen, right in zip(resumed, rates[RESUME:], strict=True)]
        first, second, *_, last = ratios[name, order]
        print(f"{name}, made {order}: {first:.2f}, {second:.2f}, …, {last:.2f} times the right rate")
for (name, order), seen in ratios.items():
    if order == "before" or name in ("CosineAnnealingLR", "PolynomialLR", "ExponentialLR"):
        assert all(abs(ratio - 1) < 1e-6 for ratio in seen)
jump = ratios["LambdaLR, cosine", "after"]
assert jump[0] > 40 and abs(jump[1] - 1) < 1e-6, "the behaviour has changed"
assert all(abs(ratio - 0.01) < 1e-6 for ratio in ratios["LinearLR, warm-up", "after"]), "the behaviour has changed"
assert all(0.3 < ratio < 0.4 for ratio in ratios["SequentialLR", "after"]), "the behaviour has changed"
PY
