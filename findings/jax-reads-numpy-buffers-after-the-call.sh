#!/bin/sh
# Question: a data loader fills the same numpy array with batch after batch, `buffer[:] = batch`, and hands it to JAX on
#   the CPU: as an argument of a jitted loss, by jax.device_put, or by jnp.array, which copies, as it is documented. Are
#   the losses those of the batches?
# Guess: by jnp.array and as an argument, yes: JAX's arrays never change, so a call reads its arguments before it returns.
#   jax.device_put and jnp.asarray may share the memory.
# Seen (jax 0.10.2, CPU): in none of the ways. The call returns before the batch is read, and the loss is that of a later
#   batch, or of parts of two. Of 20 batches, most have a wrong loss, and most arrays of jnp.array hold other numbers than
#   the array that they were made from had; how many differs from run to run. Arrays of jax.device_put go on changing with
#   the buffer. A copy by numpy, buffer.copy(), is right, and so is jnp.array(buffer).block_until_ready(). There is no
#   message, and small batches hide it, since they are read in time.
# Hurts: loaders with a preallocated or ring buffer: batches are trained on twice, others never, and no run can be
#   repeated. torch.from_numpy shares memory too, but a call of torch has read its arguments when it returns.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
fi
JAX_PLATFORMS=cpu "$PYTHON" -W error - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

BATCHES, SHAPE, VOCABULARY = 20, (64, 1024), 50_304
generator = np.random.default_rng(0)
batches = [generator.integers(0, VOCABULARY, SHAPE, dtype=np.int32) for _ in range(BATCHES)]
table = jax.random.normal(jax.random.key(0), (VOCABULARY, 256))


@jax.jit
def loss(table, tokens):
    x = table[tokens]
    for _ in range(4):
        x = jnp.tanh(x @ table[:256])
    return x.mean()


right = [float(loss(table, batch)) for batch in batches]  # float() waits, and each batch is an array of its own
ways = {
    "as an argument": lambda buffer: buffer,
    "by jax.device_put": jax.device_put,
    "by jnp.array": jnp.array,
    "by buffer.copy()": lambda buffer: buffer.copy(),
    "by jnp.array, waiting": lambda buffer: jnp.array(buffer).block_until_ready(),
}
wrong = {}
for name, hand_over in ways.items():
    buffer = np.empty(SHAPE, np.int32)
    losses, arrays = [], []
    for batch in batches:
        buffer[:] = batch
        arrays.append(hand_over(buffer))
        losses.append(loss(table, arrays[-1]))
    wrong[name] = sum(abs(float(seen) - value) > 1e-6 for seen, value in zip(losses, right, strict=True))
    print(f"{name}: {wrong[name]} of {BATCHES} losses are wrong", end="")
    if arrays[-1] is not buffer:
        changed = sum(not np.array_equal(array, batch) for array, batch in zip(arrays, batches, strict=True))
        print(f"; {changed} arrays hold something else than their batch", end="")
    print()
assert wrong["by buffer.copy()"] == wrong["by jnp.array, waiting"] == 0
for name in ("as an argument", "by jax.device_put", "by jnp.array"):
    assert wrong[name] > 0, "the behaviour has changed"
PY
