#!/bin/sh
# Question: a run with megatron-core's OptimizerParamScheduler diverges at step 60. The same process goes back to the
#   checkpoint of step 50, and loads the states of model, optimizer and scheduler. At which rate does it go on?
# Guess: at that of step 50. To load a state is to set it, as with the schedulers of torch.
# Seen (megatron-core 0.16.1, torch 2.13.0): at that of step 110. load_state_dict adds the steps of the checkpoint to those
#   of the scheduler, which is right for a new scheduler only. With 100 steps in all, the rate is min_lr at once and for
#   the rest of the run, and the scheduler's next checkpoint has the wrong number of steps as well. There is no message.
# Hurts: runs that go back to a checkpoint after a NaN or a spike without a new process, and notebooks.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 megatron-core==0.16.1
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
schedule = OptimizerParamScheduler(
    optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style="cosine",
    start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
)  # fmt: skip
rates = []
for step in range(60):
    if step == 50:
        states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    schedule.step(1)
optimizer.load_state_dict(states[0])
schedule.load_state_dict(states[1])
rate = optimizer.param_groups[0]["lr"]
print(f"rate at step 50: {rates[50]:.3g}; saved with {states[1]['num_steps']} steps")
print(f"after going back: rate {rate:.3g}, {schedule.num_steps} steps")
assert schedule.num_steps == 110 and rate == 1e-5, "the behaviour has changed"
PY
