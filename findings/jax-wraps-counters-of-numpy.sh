#!/bin/sh
# Question: a train state counts tokens. A run stores the count with numpy, np.int64(3_000_000_000), and puts it into JAX
#   again, by jnp.asarray, jax.device_put, a jitted function, or Orbax's restore. What is the count?
# Guess: 3,000,000,000, or an error. jnp.asarray(3_000_000_000), of Python's integer, raises an OverflowError.
# Seen (jax 0.10.2, orbax-checkpoint 0.12.8): -1,294,967,296, without a warning. Unless jax_enable_x64 is set, JAX has no
#   int64, and values of numpy are cast to int32 whatever they are. Restoring a stored int64 array into a template of
#   int32, as jnp.zeros(1, int) is, wraps as well. Sums of int32 counts wrap, as usual.
# Hurts: counts of tokens, which all runs beyond 2.1 billion tokens exceed: schedules by tokens begin again or stay at
#   their start, and logs have negative tokens. Keep the count in Python's integers, or count sequences or steps.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6
fi
JAX_PLATFORMS=cpu "$PYTHON" - "$dir" <<'PY'
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

tokens = np.array([3_000_000_000])
path = f"{sys.argv[1]}/checkpoint"
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(path, {"tokens": tokens})
checkpointer.wait_until_finished()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    seen = {
        "jnp.asarray": jnp.asarray(tokens),
        "jax.device_put": jax.device_put(tokens),
        "jitted identity": jax.jit(lambda x: x)(tokens),
        "jnp.zeros + np.int64": jnp.zeros(1, int) + np.int64(3_000_000_000),
        "Orbax": checkpointer.restore(path, {"tokens": jnp.zeros(1, int)})["tokens"],
    }
    of_overflow = [warning for warning in caught if "overflow" in str(warning.message).lower()]
for name, value in seen.items():
    print(f"{name}: {value} {value.dtype}")
print(f"warnings of overflow: {len(of_overflow)}; Orbax without a template: {checkpointer.restore(path)['tokens']}")
try:
    jnp.asarray(3_000_000_000)
    raise SystemExit("Python's integer was not refused: the behaviour has changed")
except OverflowError as error:
    print(f"Python's integer: {error}")
assert not of_overflow and all(value[0] == -1_294_967_296 for value in seen.values()), "the behaviour has changed"
PY
