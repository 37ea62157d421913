#!/bin/sh
# Question: a first phase trained at 1e-3. For the second, the optimizer's groups get "lr" = 1e-4, and a new LambdaLR (as
#   all schedules of transformers are) that begins with a factor of 1. At which rate does the second phase begin?
# Guess: at 1e-4, the rate of the groups when the schedule is made.
# Seen (torch 2.13.0): at 1e-3. The first schedule left the entry "initial_lr" in each group, and a new one takes that for
#   its base rate, if it is there, instead of "lr". CosineAnnealingWarmRestarts does the same. CosineAnnealingLR, LinearLR
#   and PolynomialLR go on from "lr" and begin at 1e-4, so one kind of schedule is right where another is not. The entry
#   is part of the optimizer's state_dict, so it also arrives with a checkpoint, where no old schedule is in sight.
#   There is no message. To set both, "lr" and "initial_lr", helps.
# Hurts: fine-tuning, cooldowns and continued pretraining that keep the optimizer's moments: they run at the rate of the
#   first phase, here ten times too high.
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
from torch.optim import lr_scheduler

weight = torch.zeros(1, requires_grad=True)
schedules = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 100),
}


def second_phase(schedule, *, checkpoint, both=False):
    """The rates of the second phase's first two steps."""
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    first = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(10):
        optimizer.step()
        first.step()
    if checkpoint:
        state = optimizer.state_dict()
        optimizer = torch.optim.AdamW([weight], lr=1e-4)
        optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
        if both:
            group["initial_lr"] = 1e-4
    second = schedule(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    second.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


seen = {}
for name, schedule in schedules.items():
    for checkpoint in (False, True):
        seen[name, checkpoint] = second_phase(schedule, checkpoint=checkpoint)
        how = "loaded from a checkpoint" if checkpoint else "kept"
        print(f"{name}, optimizer {how}: {', '.join(f'{rate:.3g}' for rate in seen[name, checkpoint])}")
both = second_phase(schedules["LambdaLR"], checkpoint=True, both=True)
print(f"LambdaLR, with initial_lr set as well: {both[0]:.3g}, {both[1]:.3g}")
assert both[0] == 1e-4
for (name, _), rates in seen.items():
    if name in ("CosineAnnealingLR", "PolynomialLR"):
        assert all(9e-5 < rate <= 1e-4 for rate in rates)
    else:
        assert all(9e-4 < rate <= 1e-3 for rate in rates), "the behaviour has changed"
PY
