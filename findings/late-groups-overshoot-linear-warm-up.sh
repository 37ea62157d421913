#!/bin/sh
# Question: LinearLR(start_factor=0.01, total_iters=10) warms up an optimizer. A parameter group is added after the
#   scheduler was made, with a learning rate of 1. What is its rate after the warm-up?
# Guess: 1, or there is an error, since the scheduler has no start for the group.
# Seen (torch 2.13.0): 100. LinearLR multiplies every group's present rate by the quotient of two successive factors,
#   and does not look at the rates that it stored. The late group begins at 1 instead of 0.01, and ends at 1 /
#   start_factor times its rate, for the rest of the run. ConstantLR(factor=0.1) makes it 10. There is no message.
#   LambdaLR, CosineAnnealingLR, OneCycleLR and SequentialLR refuse the group at their next step.
# Hurts: layers that are unfrozen or added in steps, heads and experts that get a group of their own later: they train
#   at many times the rate that was set. Make the scheduler after all groups.
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
from torch.optim.lr_scheduler import ConstantLR, LinearLR


def rates(build):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    for _ in range(20):
        optimizer.step()
        scheduler.step()
    return [round(group["lr"], 6) for group in optimizer.param_groups]


linear = rates(lambda optimizer: LinearLR(optimizer, start_factor=0.01, total_iters=10))
constant = rates(lambda optimizer: ConstantLR(optimizer, factor=0.1, total_iters=10))
print(f"after 20 steps, first and late group: LinearLR {linear}, ConstantLR {constant}")
assert linear == [1.0, 100.0], "the behaviour has changed"
assert constant == [1.0, 10.0], "the behaviour has changed"
PY
