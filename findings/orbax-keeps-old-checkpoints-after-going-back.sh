#!/bin/sh
# Question: a JAX run diverges at step 20. It goes back to the checkpoint of step 10, with another learning rate, and saves
#   every 5 steps by Orbax's CheckpointManager.save, in the same folder. What do the checkpoints of steps 15 and 20 hold?
# Guess: the new weights, or save raises an error, since these steps exist.
# Seen (orbax-checkpoint 0.12.8, jax 0.10.2): the old weights. save returns False and writes nothing for every step that is
#   not greater than the latest in the folder, whether that step exists or not: steps 12 and 18 are not saved either. There
#   is no error and no warning. A restart then loads latest_step(), which is 20, the diverged weights. With force=True,
#   steps that do not exist are saved, and for those that do there is an error. So delete the later steps first,
#   manager.delete(step), when a run goes back.
# Hurts: runs that go back after a spike of the loss. Until they have passed the old run they have no checkpoint, and a job
#   that is killed in that time continues from the weights that it had left behind.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
fi
"$PYTHON" -W error::UserWarning - "$dir/checkpoints" <<'PY'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def save(manager, step, weight, **options):
    return manager.save(step, args=ocp.args.StandardSave({"weight": jnp.full(3, weight)}), **options)


def weight(manager, step):
    return manager.restore(step, args=ocp.args.StandardRestore({"weight": jnp.zeros(3)}))["weight"][0].item()


with ocp.CheckpointManager(sys.argv[1]) as manager:  # the run that diverges: weights are 1
    assert all(save(manager, step, 1.0) for step in (0, 5, 10, 15, 20))
with ocp.CheckpointManager(sys.argv[1]) as manager:  # goes back to step 10: weights are 2
    weight(manager, 10)
    saved = {step: save(manager, step, 2.0) for step in (12, 15, 18, 20)}
    manager.wait_until_finished()
    print("save after going back to step 10 returns", saved)
    steps = {step: weight(manager, step) for step in manager.all_steps()}
    print("weights by step:", steps, "; latest step", manager.latest_step())
    assert not any(saved.values()) and set(steps.values()) == {1.0}, "the behaviour has changed"
    assert manager.latest_step() == 20
    assert save(manager, 12, 2.0, force=True)
    try:
        save(manager, 15, 2.0, force=True)
        raise AssertionError("step 15 was saved with force=True")
    except ValueError as error:
        print("step 15 with force=True:", error)
    manager.delete(20)
    manager.delete(15)
    assert save(manager, 15, 2.0)
    manager.wait_until_finished()
    print("after steps 15 and 20 were deleted, step 15 has", weight(manager, 15))
    assert weight(manager, 15) == 2.0
PY
