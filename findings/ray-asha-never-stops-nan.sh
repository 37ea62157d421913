#!/bin/sh
# Question: ASHA in Ray Tune stops the worse half of the trials at 2, 4, 8, … steps. The losses of two of eight trials are
#   NaN and infinity from the second step on. When are they stopped?
# Guess: both at the first chance, as the worst.
# Seen (ray 2.60.0): the one with infinity at step 2, the one with NaN never: it runs to the end, as the best do. A trial
#   goes on unless its score is below the cut-off, which a NaN never is; the cut-off is a percentile of the other scores.
#   With three of eight trials at NaN, all three run to the end. mode="max" is the same.
# Hurts: searches for the learning rate, where the highest rates diverge: dead runs take the whole budget that ASHA is to
#   save, and keep their GPUs. Report a large number in place of NaN, or stop the trial in the training function.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'ray[tune]==2.60.0' numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
from math import inf, nan
from types import SimpleNamespace

import ray
from ray.tune.schedulers import ASHAScheduler

print("ray", ray.__version__)
STEPS = 16


def run(bad, mode):
    """The last step of each trial by the scheduler's decisions; those in `bad` report that value from step 2 on."""
    scheduler = ASHAScheduler(grace_period=2, reduction_factor=2, max_t=STEPS)
    sign = 1 if mode == "min" else -1
    scheduler.set_search_properties("loss", mode)
    trials = {i: SimpleNamespace(trial_id=str(i)) for i in range(8)}
    last = dict.fromkeys(trials, STEPS)
    for trial in trials.values():
        scheduler.on_trial_add(None, trial)
    running = set(trials)
    for step in range(1, STEPS):
        for i in sorted(running):
            loss = 2 + 0.01 * i + 3 / step
            if i in bad:
                loss = bad[i] if step > 1 else loss - 0.5
            result = {"loss": sign * loss, "training_iteration": step}
            if scheduler.on_trial_result(None, trials[i], result) == scheduler.STOP:
                last[i] = step
                running.discard(i)
    return last


for mode in ("min", "max"):
    last = run({3: nan, 5: inf}, mode)
    print(f"ASHA, mode {mode}: last step of the trials {last}; trial 3 is NaN, trial 5 infinite")
    assert last[5] == 2 and last[3] == STEPS, "the behaviour has changed"
    assert sum(step == STEPS for step in last.values()) < 5
last = run({1: nan, 3: nan, 5: nan}, "min")
print(f"ASHA, three NaN: {last}")
assert last[1] == last[3] == last[5] == STEPS, "the behaviour has changed"
PY
