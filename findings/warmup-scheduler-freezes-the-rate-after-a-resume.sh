#!/bin/sh
# Question: a run uses GradualWarmupScheduler of the package warmup-scheduler, with torch's CosineAnnealingLR after the
#   warm-up. It is stopped, and a new process loads the states of optimizer and schedule. Which rates does it have?
# Guess: those of the uninterrupted run.
# Seen (warmup-scheduler 0.3, torch 2.13.0): the rate of the checkpoint, for good. The state holds the inner schedule as an
#   object, which is saved together with the old optimizer. After loading, that old optimizer, which no model uses, gets
#   the rates, and the new one keeps its own. If the run was stopped during the warm-up, the warm-up goes on, and the rate
#   then drops to about that of the checkpoint and stays there. torch.load refuses such a file with weights_only=True and
#   asks for False; with False, there is no message. get_last_lr() reports the rate that does not change.
# Hurts: resumed runs, which end at a high rate, without the decay, and their checkpoints, which hold the optimizer twice.
#   torch's SequentialLR with LinearLR resumes rightly.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 warmup-scheduler==0.3
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata
import io

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from warmup_scheduler import GradualWarmupScheduler

print("warmup-scheduler", importlib.metadata.version("warmup-scheduler"), "torch", torch.__version__)


def gradual(optimizer):
    return GradualWarmupScheduler(optimizer, multiplier=1, total_epoch=5, after_scheduler=CosineAnnealingLR(optimizer, 20))


def sequential(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 20)]
    return SequentialLR(optimizer, parts, milestones=[5])


def rates(build, stop=None):
    """The learning rates of 25 steps; before step `stop`, all is saved, made anew and loaded."""

    def make():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, build(optimizer)

    optimizer, schedule = make()
    seen = []
    for step in range(25):
        if step == stop:
            file = io.BytesIO()
            torch.save([optimizer.state_dict(), schedule.state_dict()], file)
            file.seek(0)
            states = torch.load(file, weights_only=False)
            optimizer, schedule = make()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        seen.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        schedule.step()
    return seen


for build in (sequential, gradual):
    whole = rates(build)
    print(f"{build.__name__}: uninterrupted, rates of every fourth step: {whole[::4]}")
    for stop in (3, 10):
        resumed = rates(build, stop)
        print(f"  stopped at step {stop}: {resumed[::4]}")
        if build is sequential:
            assert resumed == whole
        else:
            frozen = set(resumed[max(stop, 6) :])
            assert len(frozen) == 1 and frozen.pop() > 20 * whole[-1], "the behaviour has changed"
PY
