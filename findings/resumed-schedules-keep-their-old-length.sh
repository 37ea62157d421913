#!/bin/sh
# Question: a run of 100 steps with CosineAnnealingLR(T_max=100) stopped after 50, and is to go on to 200. The new program
#   makes CosineAnnealingLR(T_max=200) and loads the state of optimizer and scheduler. What does the rate do?
# Guess: it goes on with the new length, to 0 at step 200, perhaps with a jump at step 50. T_max is a setting of the
#   program; the state says where the schedule is.
# Seen (torch 2.13.0): it falls to 0 at step 100, as in the old run, and rises again, to the full rate at step 200. The
#   state holds all settings of a scheduler, and load_state_dict puts T_max = 100 over the 200 of the program. LinearLR and
#   PolynomialLR stay at 0 from step 100 on. LambdaLR, whose function is not in the state, has the new length. base_lrs and
#   eta_min are replaced as well. There is no message.
# Hurts: runs that are extended: half of the new steps have no learning rate, or end at the highest one. To
#   set T_max after the state is loaded helps.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, PolynomialLR

weight = torch.zeros(1, requires_grad=True)


def start(schedule, steps):
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return optimizer, schedule(optimizer, steps)


def advance(optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def extended(schedule, *, then=None):
    """The rates at steps 50, 100, 150 and 200 of a run that is stopped at 50 and extended from 100 to 200."""
    optimizer, scheduler = start(schedule, 100)
    advance(optimizer, scheduler, 50)
    states = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = start(schedule, 200)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    if then is not None:
        then(scheduler)
    return [round(abs(advance(optimizer, scheduler, steps)), 4) for steps in (0, 50, 50, 50)]


schedules = {
    "CosineAnnealingLR": CosineAnnealingLR,
    "LinearLR": lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
    "PolynomialLR": PolynomialLR,
    "LambdaLR": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps),
}
seen = {name: extended(schedule) for name, schedule in schedules.items()}
seen["CosineAnnealingLR, then T_max = 200"] = extended(
    CosineAnnealingLR, then=lambda scheduler: setattr(scheduler, "T_max", 200)
)
for name, rates in seen.items():
    print(f"{name}: rates at steps 50, 100, 150 and 200: {', '.join(map(str, rates))}")
assert seen["LambdaLR"][1:] == [0.5, 0.25, 0.0]
assert seen["CosineAnnealingLR"][1:] == [0.0, 0.5, 1.0], "the behaviour has changed"
for name in ("LinearLR", "PolynomialLR"):
    assert seen[name][1:] == [0.0, 0.0, 0.0], "the behaviour has changed"
PY
