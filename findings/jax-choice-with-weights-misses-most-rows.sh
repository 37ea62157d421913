#!/bin/sh
# Question: rows are sampled by weight, jax.random.choice(key, rows, shape, p=weights), in each step with another key. The
#   dataset has 40 million rows of equal weight. Can every row be drawn?
# Guess: yes, and about equally often.
# Seen (jax 0.10.2, CPU): no. At most 2^23 = 8.4 million rows can be drawn, whatever the key; the other 79% are never seen.
#   choice compares one uniform fp32 number, which has 23 random bits, with cumulative sums of the weights. Of 6 million
#   rows all can be drawn, but some twice as often as others. Without p, all of 40 million rows can be drawn. With
#   jax_enable_x64 and weights in fp64, p is right too.
# Hurts: weighted sampling of documents, examples or token positions, hard-example mining and importance sampling, in JAX:
#   most of a large dataset is left out for all of the run, while the weights of what is seen look right on average.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 4_000_000


def draws(rows, keys, weighted):
    """How often each row is drawn, with several keys."""
    counts = np.zeros(rows, np.int64)
    p = jnp.full(rows, 1 / rows, jnp.float64 if jax.config.jax_enable_x64 else jnp.float32) if weighted else None
    for seed in range(keys):
        counts += np.bincount(jax.random.choice(jax.random.key(seed), rows, (DRAWS,), p=p), minlength=rows)
    return counts


rows, keys = 40_000_000, 5
expected = 1 - np.exp(-keys * DRAWS / rows)
seen = {}
for name, weighted, x64 in (("p", True, False), ("no p", False, False), ("p in fp64", True, True)):
    with jax.enable_x64(x64):
        counts = draws(rows, keys, weighted)
    seen[name] = (counts > 0).mean()
    print(f"{rows:,} rows, {name}: {(counts > 0).sum():,} rows ({seen[name]:.1%}) in {keys * DRAWS:,} draws; "
          f"{expected:.1%} expected")
assert abs(seen["no p"] - expected) < 0.001 and abs(seen["p in fp64"] - expected) < 0.001
assert seen["p"] * rows <= 2**23, "the behaviour has changed"
rows = 6_000_000
counts = draws(rows, 10, True)
low, high = np.percentile(counts, [10, 90])
print(f"{rows:,} rows, p: one row in ten is drawn at most {low:.0f} times, one in ten at least {high:.0f} times; "
      f"{counts.mean():.1f} on average")
assert np.percentile(draws(rows, 10, False), 90) < 2 * counts.mean() and high > 2.5 * low, "the behaviour has changed"
PY
