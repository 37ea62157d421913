#!/bin/sh
# Question: ChainedScheduler([warm_up, decay]) of torch combines a linear warm-up, LinearLR(start_factor=0.1,
#   total_iters=10), with a second schedule. Is there a warm-up?
# Guess: yes, the two are combined. (It was written down for CosineAnnealingLR, where it is right.)
# Seen (torch 2.13.0): only with some. With CosineAnnealingLR or ExponentialLR, the rate begins at 0.1 of the base rate.
#   With LambdaLR (as all schedules of transformers), CosineAnnealingWarmRestarts or OneCycleLR, the warm-up does not exist:
#   these compute the rate from the base rate and overwrite what the schedulers before them set. In the other order,
#   LambdaLR first, it is worse: LinearLR multiplies the overwritten rate by its growth of that step, so the rate is 1.9
#   times the base rate in the second step, and too high until the warm-up ends. There is no message.
# Hurts: training that needs its warm-up. The first steps have the full learning rate or more; the code and the saved
#   state show a warm-up.
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


def rates(make_schedulers, chain=True):
    """Learning rates of 12 steps with a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedulers = make_schedulers(optimizer)
    scheduler = lr_scheduler.ChainedScheduler(schedulers, optimizer=optimizer) if chain else schedulers[0]
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warm_up(optimizer):
    return lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)


decays = {
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.99),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=100),
}
chained, alone = {}, {}
for name, decay in decays.items():
    chained[name] = rates(lambda optimizer, decay=decay: [warm_up(optimizer), decay(optimizer)])
    alone[name] = rates(lambda optimizer, decay=decay: [decay(optimizer)], chain=False)
    print(f"warm-up and {name}: {[round(rate, 3) for rate in chained[name]]}")
reverse = rates(lambda optimizer: [decays["LambdaLR"](optimizer), warm_up(optimizer)])
print(f"LambdaLR and warm-up: {[round(rate, 3) for rate in reverse]}")
for name in ("CosineAnnealingLR", "ExponentialLR"):
    assert abs(chained[name][0] - 0.1) < 1e-6
for name in ("LambdaLR", "CosineAnnealingWarmRestarts", "OneCycleLR"):
    assert chained[name] == alone[name], "the behaviour has changed"
assert reverse[1] > 1.8 and all(rate > 1 for rate in reverse[1:10]), "the behaviour has changed"
PY
