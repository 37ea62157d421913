#!/bin/sh
# Question: Orbax's CheckpointManager keeps the best checkpoints by validation loss: best_fn, best_mode="min",
#   max_to_keep=2. One evaluation gives NaN. Which checkpoints are left?
# Guess: the two with the lowest losses. NaN is never among the best.
# Seen (orbax-checkpoint 0.12.8): losses of 3, 2, NaN, 1.5 and 2.5 leave those with 1.5 and 2.5; the second best was
#   deleted. With best_mode="max" (accuracies of 0.6, 0.5, NaN, 0.3, 0.4), the best is deleted, 0.3 and 0.4 are left, and
#   best_step() returns that with 0.4. Checkpoints are sorted by their metric, and no comparison with NaN is true, so
#   those saved before and after it are sorted apart. Nothing warns.
# Hurts: runs that keep few checkpoints and evaluate in low precision, or on a shard without targets, whose mean is NaN:
#   one NaN deletes the best weights for good. Let best_fn return infinity (or minus infinity) in place of NaN.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
fi
"$PYTHON" -W error::UserWarning - "$dir" <<'PY'
import math
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def kept(name, values, mode, best_fn):
    """The metrics of the checkpoints that are left, and that of the best."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=best_fn, best_mode=mode)
    with ocp.CheckpointManager(f"{sys.argv[1]}/{name}", options=options) as manager:
        for step, value in enumerate(values):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.zeros(1)}), metrics={"metric": value})
        manager.wait_until_finished()
        left = [values[step] for step in manager.all_steps()]
        best = values[manager.best_step()]
    print(f"{name}: saved {values}, best is {mode}; left {left}, best_step() has {best}")
    return left, best


def plain(metrics):
    return metrics["metric"]


losses = [3.0, 2.0, math.nan, 1.5, 2.5]
accuracies = [0.6, 0.5, math.nan, 0.3, 0.4]
assert kept("losses without NaN", [3.0, 2.0, 9.0, 1.5, 2.5], "min", plain) == ([2.0, 1.5], 1.5)
assert kept("losses", losses, "min", plain) == ([1.5, 2.5], 1.5), "the behaviour has changed"
assert kept("accuracies", accuracies, "max", plain) == ([0.3, 0.4], 0.4), "the behaviour has changed"
left, best = kept(
    "NaN as -inf", accuracies, "max", lambda metrics: -math.inf if math.isnan(metrics["metric"]) else metrics["metric"]
)
assert (left, best) == ([0.6, 0.5], 0.6)
PY
