#!/bin/sh
# Question: an Adam with betas=(0.9, 0.95) is scheduled by DeepSpeed's OneCycle, with its cycle of momentum left alone (it
#   is on). It raises and lowers the learning rate, and lowers and raises the momentum. What are the betas?
# Guess: the first moves between cycle_min_mom, 0.8, and cycle_max_mom, 0.9; the second stays 0.95, as with torch's
#   OneCycleLR, which cycles the momentum too.
# Seen (DeepSpeed 0.19.8, torch 2.13.0): the second is 0.99 from the first step to the last, whatever was set, and also
#   after the cycle. The number stands in the code, no setting reaches it, and there is no message. The optimizer's average
#   of squares is over 100 steps instead of 20 here, or instead of 1,000 with the usual 0.999.
# Hurts: runs whose beta2 was chosen, and comparisons of OneCycle with other schedules, which change beta2 as well.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 setuptools wheel
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
fi
DS_ACCELERATOR=cpu "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from deepspeed.runtime.lr_schedules import OneCycle

torch.manual_seed(0)
seen = {}


def train(name, beta2, schedule):
    """The betas in each of 40 steps, of which 20 are the cycle."""
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, beta2))
    schedule = schedule(optimizer)
    seen[name, beta2] = []
    for _ in range(40):
        weight.grad = torch.randn(4)
        optimizer.step()
        schedule.step()
        seen[name, beta2].append(optimizer.param_groups[0]["betas"])
    betas = [sorted({round(betas[i], 4) for betas in seen[name, beta2]}) for i in (0, 1)]
    print(f"{name}, beta2 set to {beta2}: beta1 from {betas[0][0]} to {betas[0][-1]}, beta2 {betas[1]}")
    return betas[1]


def deepspeed(optimizer):
    return OneCycle(optimizer, cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=10, decay_lr_rate=0.0)


def torchs(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=50, base_momentum=0.8, max_momentum=0.9)


for beta2 in (0.95, 0.999):
    assert train("torch's OneCycleLR", beta2, torchs) == [beta2]
    assert train("DeepSpeed's OneCycle", beta2, deepspeed) == [0.99], "the behaviour has changed"
PY
