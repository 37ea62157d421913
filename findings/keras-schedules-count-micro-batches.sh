#!/bin/sh
# Question: a Keras optimizer has gradient_accumulation_steps=4 and a learning rate that decays to zero in 8 steps. It
#   trains on 32 micro-batches, which make 8 updates. Which learning rates have they?
# Guess: 1, 0.875, … 0.125. Schedules count updates, and optimizer.iterations does so.
# Seen (keras 3.15.1, JAX backend): 0.625 and 0.125, and then 0. The schedule counts micro-batches, so a warm-up or a
#   decay lasts a quarter of its updates. optimizer.iterations is 8 after all 32; only the documentation of
#   gradient_accumulation_steps says that schedules look at the "real" iterations. Multiply decay_steps by it.
# Hurts: whoever adds accumulation to a working setup, to use less memory: training stops learning after a quarter of the
#   run, and the loss is flat as if it had converged.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile keras==3.15.1 jax==0.10.2 numpy==2.4.6
fi
KERAS_BACKEND=jax "$PYTHON" - <<'PY'
import jax.numpy as jnp
import keras
import numpy as np


def rates(micro_batches, accumulation, decay_steps):
    """Learning rates of the updates, seen from a weight whose gradient is always 1."""
    weight = keras.Variable(np.zeros(1, np.float32))
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, decay_steps, 0.0)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=accumulation)
    optimizer.build([weight])
    seen, before = [], 0.0
    for step in range(micro_batches):
        optimizer.apply([jnp.ones(1)], [weight])
        if accumulation is None or (step + 1) % accumulation == 0:
            after = float(np.asarray(weight)[0])
            seen.append(round(before - after, 4))
            before = after
    print(f"{micro_batches} batches, accumulation {accumulation}, decay_steps {decay_steps}: rates {seen}, "
          f"optimizer.iterations {int(np.asarray(optimizer.iterations))}")
    return seen


plain = rates(8, None, 8)
accumulated = rates(32, 4, 8)
longer = rates(32, 4, 32)
assert plain == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
assert accumulated == [0.625, 0.125, 0, 0, 0, 0, 0, 0], "the behaviour has changed"
assert len([rate for rate in longer if rate > 0]) == 8
PY
