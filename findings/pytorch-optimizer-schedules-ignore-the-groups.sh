#!/bin/sh
# Question: an optimizer has two groups, with learning rates 1 and 0.1. It gets a schedule with warm-up of
#   pytorch_optimizer: LinearScheduler, CosineScheduler or PolyScheduler(t_max=20, max_lr=1, warmup_steps=5),
#   CosineAnnealingWarmupRestarts or REXScheduler. What are the rates?
# Guess: those of torch's schedules: each group keeps its factor, 1 to 0.1. They rise to 1 and 0.1, then fall.
# Seen (pytorch_optimizer 4.1.0, torch 2.13.0): all five set every group to the same rate, up to max_lr: the second group
#   has ten times the rate that it was given, without a message. The first two updates of the first three schedules have a
#   rate of 0. PolyScheduler does not fall: after the warm-up, it is max_lr times the root of the step, 3.9 times max_lr
#   at its end, and 100 times after 10,000 steps; its formula says so. get_wsd_schedule keeps the groups' factors, but
#   with its default cooldown it falls below min_lr_ratio and jumps up to it after the last step: 0.051, then 0.1.
# Hurts: runs with a smaller rate for embeddings, heads or pretrained layers, as in layer-wise decay: they are
#   overwritten. And whoever expects from "polynomial" what torch's and transformers' schedules of that name do. torch's
#   SequentialLR of LinearLR and a decay keeps the groups.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pytorch-optimizer==4.1.0
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata

import pytorch_optimizer
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

STEPS, WARM_UP = 20, 5


def rates(make, updates=STEPS + 2):
    """The rates of both groups in each update."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    schedule = make(optimizer)
    used = []
    for _ in range(updates):
        used.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return used


def of_torch(optimizer):
    warm_up = LinearLR(optimizer, 0.01, total_iters=WARM_UP)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - WARM_UP)], [WARM_UP])


def of_package(name, **options):
    return lambda optimizer: getattr(pytorch_optimizer, name)(optimizer, **options)


warm = {"t_max": STEPS, "max_lr": 1.0, "warmup_steps": WARM_UP}
ways = {
    "torch, linear and cosine": of_torch,
    "LinearScheduler": of_package("LinearScheduler", **warm),
    "CosineScheduler": of_package("CosineScheduler", **warm),
    "PolyScheduler": of_package("PolyScheduler", **warm),
    "CosineAnnealingWarmupRestarts": lambda optimizer: pytorch_optimizer.CosineAnnealingWarmupRestarts(
        optimizer, first_cycle_steps=STEPS, max_lr=1.0, warmup_steps=WARM_UP
    ),
    "REXScheduler": of_package("REXScheduler", total_steps=STEPS, max_lr=1.0),
    "get_wsd_schedule": of_package(
        "get_wsd_schedule", num_warmup_steps=WARM_UP, num_stable_steps=5, num_decay_steps=10, min_lr_ratio=0.1
    ),
}
print("pytorch_optimizer", importlib.metadata.version("pytorch_optimizer"))
seen = {name: rates(make) for name, make in ways.items()}
for name, used in seen.items():
    largest = [max(rate[group] for rate in used) for group in (0, 1)]
    print(f"{name}: largest rates {largest[0]:.2f} and {largest[1]:.2f}; the first group's "
          + " ".join(f"{rate[0]:.3f}" for rate in used))
    if name in ("torch, linear and cosine", "get_wsd_schedule"):
        assert all(abs(second - first / 10) < 1e-9 for first, second in used)
    else:
        assert all(first == second for first, second in used), "the behaviour has changed"
for name in ("LinearScheduler", "CosineScheduler", "PolyScheduler"):
    assert seen[name][0][0] == seen[name][1][0] == 0 < seen[name][2][0], "the behaviour has changed"
assert seen["PolyScheduler"][-1][0] > 3, "the behaviour has changed"
late = rates(ways["PolyScheduler"], 10_000 + WARM_UP + 2)[-1][0]
print(f"PolyScheduler after 10,000 steps: {late:.1f}")
assert late > 99, "the behaviour has changed"
wsd = [first for first, _ in seen["get_wsd_schedule"]]
assert wsd[STEPS - 1] < 0.1 == wsd[STEPS], "the behaviour has changed"
PY
