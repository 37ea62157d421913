#!/bin/sh
# Question: a rolling hash of tokens, hash = hash * 31 + token, is computed with np.uint64 values in Python, and the
#   function is compiled by numba.njit to be fast. Are the hashes the same?
# Guess: yes. Both wrap around at 2^64.
# Seen (numba 0.68.1, numpy 2.4.6): no. In numba, 31 is an int64, and uint64 times int64 is float64. The hash becomes a
#   float of 53 bits, which does not wrap around and depends on the first tokens only. Below, 10,000 windows of 24
#   tokens that differ in their last 8 have 10,000 hashes in numpy, and 1 when compiled. No message says so. With
#   np.uint64(31) the hashes are right. numpy has kept uint64 for Python's integers since 2.0.
# Hurts: deduplication and n-gram filters with own hashes: different texts seem to be equal and are removed. An array of
#   uint64 that the floats are assigned to hides their type.
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


def rolling_hash(tokens):
    value = np.uint64(7)
    for token in tokens:
        value = value * 31 + token
    return value


def typed_hash(tokens):
    value = np.uint64(7)
    for token in tokens:
        value = value * np.uint64(31) + token
    return value


windows = np.full((10_000, 24), 1000, np.uint64)
windows[:, 16:] = np.random.default_rng(0).integers(0, 50_000, (10_000, 8))
seen = {}
for name, function in (
    ("numpy", rolling_hash),
    ("compiled", numba.njit(rolling_hash)),
    ("compiled, np.uint64(31)", numba.njit(typed_hash)),
):
    with np.errstate(over="ignore"):
        seen[name] = [function(window) for window in windows]
    first = seen[name][0]
    print(f"{name}: {len(set(seen[name]))} different hashes of {len(windows)} windows, the first {first!r}")
assert seen["numpy"] == seen["compiled, np.uint64(31)"] and len(set(seen["numpy"])) > 9_900
assert isinstance(seen["compiled"][0], float) and len(set(seen["compiled"])) < 10, "the behaviour has changed"
PY
