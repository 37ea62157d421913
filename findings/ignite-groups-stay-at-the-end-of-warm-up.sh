#!/bin/sh
# Question: an optimizer has two groups of parameters, with rates of 0.1 and 0.01, and torch's ExponentialLR. Ignite's
#   create_lr_scheduler_with_warmup(…, warmup_end_value=0.1) puts a warm-up before it. Which rates follow the warm-up?
# Guess: those of the groups, 0.1 and 0.01, each with its decay. As documented, if the schedule's first rate differs from
#   warmup_end_value, one more event after the warm-up sets it. An optimizer with the one group of 0.01 does so.
# Seen (pytorch-ignite 0.5.5, torch 2.13.0): the second group stays at 0.1, ten times its rate, and decays from there. With
#   more than one group, the event is left out, also where all groups have a rate of 0.01. torch's ExponentialLR, StepLR,
#   MultiStepLR and LinearLR take the last rate of a group times a factor, so that the error never ends. CosineAnnealingLR
#   and LambdaLR go back. There is no message. Without warmup_end_value, each group warms up to its own rate, and all is
#   right.
# Hurts: models with smaller rates for some parameters, as embeddings, heads or fine-tuned layers: they train at the rate of
#   the others, while a run with one group is right.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 pytorch-ignite==0.5.5 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import torch
from ignite.handlers import create_lr_scheduler_with_warmup
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, MultiStepLR, StepLR

WARM_UP, STEPS = 4, 24
SCHEDULES = {
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.95),
    "StepLR": lambda optimizer: StepLR(optimizer, 8),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [6, 12]),
    "LinearLR": lambda optimizer: LinearLR(optimizer, 1.0, 0.0, 40),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 40),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.95**step),
}


def rates(make, *groups, **settings):
    """The rates of each group over time, from the last event of the warm-up on."""
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in groups]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule = create_lr_scheduler_with_warmup(
        make(optimizer), warmup_start_value=0.0, warmup_duration=WARM_UP, **settings
    )
    seen = []
    for _ in range(STEPS):
        schedule(None)
        seen.append([group["lr"] for group in optimizer.param_groups])
    return [list(values) for values in zip(*seen[WARM_UP - 1 :])]


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name, make in SCHEDULES.items():
        alone = rates(make, 0.01, warmup_end_value=0.1)[0]
        both = rates(make, 0.1, 0.01, warmup_end_value=0.1)
        same = rates(make, 0.01, 0.01, warmup_end_value=0.1)
        right = rates(make, 0.1, 0.01)
        for title, values in {"one group": alone, "with another": both[1], "no warmup_end_value": right[1]}.items():
            print(f"{name}, rate 0.01, {title}: {' '.join(format(value, '.2g') for value in values[:8])}")
        for once, own in zip(alone[1:], right[1]):
            assert abs(once - own) < 1e-6
        times = both[1][-1] / right[1][-1]
        equal = same[0][-1] / right[1][-1]
        print(f"{name}: at the end {times:.3g} times the rate of the group, {equal:.3g} times if both groups have it")
        expected = 1 if name in ("CosineAnnealingLR", "LambdaLR") else 10
        assert abs(times - expected) < 1e-3 and abs(equal - expected) < 1e-3, "the behaviour has changed"
assert not caught
PY
