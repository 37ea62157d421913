#!/bin/sh
# Question: a function that takes the mean and the variance of 40 million fp32 activations with numpy is compiled by
#   numba.njit. Does it return the same, up to rounding?
# Guess: yes. numba compiles numpy's functions, and numpy's sums of fp32 are right, since they are made in pieces.
# Seen (numba 0.68.1, numpy 2.4.6): of numbers between 0 and 1, the mean is 0.419 instead of 0.500, and the variance 0.0898
#   instead of 0.0833. numba adds one number after the other to one fp32 sum, which stops at 2^24 = 16,777,216. It stops
#   as well when all numbers are ones. At 1 million numbers, the error is below 0.1%. a.sum(dtype=np.float64) is right;
#   so is an own loop with an fp64 sum.
# Hurts: statistics of activations, losses and scores of many tokens that were compiled to be fast: means and thresholds are
#   too small, more so with more tokens, and a test on a small array passes.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numba==0.68.1 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import numba
import numpy as np


def statistics(a):
    return np.sum(a), np.mean(a), np.var(a), a.sum(dtype=np.float64)


compiled = numba.njit(statistics)
seen = {}
for size in (1_000_000, 40_000_000):
    values = np.random.default_rng(0).random(size, dtype=np.float32)
    for name, function in (("numpy", statistics), ("numba", compiled)):
        seen[size, name] = [float(value) for value in function(values)]
        total, mean, variance, total64 = seen[size, name]
        print(f"{size:,} numbers, {name}: sum {total:,.0f}, mean {mean:.4f}, variance {variance:.4f}, "
              f"sum with dtype=np.float64 {total64:,.0f}")
ones = compiled(np.ones(40_000_000, np.float32))[0]
print(f"40,000,000 ones, numba: sum {ones:,.0f}")
assert np.allclose(seen[1_000_000, "numba"], seen[1_000_000, "numpy"], rtol=1e-3)
numpy, compiled = seen[40_000_000, "numpy"], seen[40_000_000, "numba"]
assert abs(numpy[1] - 0.5) < 1e-3 and abs(compiled[3] / numpy[3] - 1) < 1e-6
assert compiled[0] == ones == 2**24 and compiled[1] < 0.42 and compiled[2] > 0.089, "the behaviour has changed"
PY
