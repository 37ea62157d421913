#!/bin/sh
# Question: a function of NumPy is compiled with numba.njit. It takes np.median of losses, one of which is NaN, and np.sign
#   of uint8 numbers. Are the results NumPy's?
# Guess: yes: NaN, and 1 for all numbers above 0. Numba says which functions it supports, and these are among them.
# Seen (numba 0.68.1, NumPy 2.4.6): no, without a message. The median is a number, as if nothing was wrong, while np.mean
#   and np.max of the same losses are NaN. np.sign of a uint8 above 127 is 255, that is -1 wrapped.
# Hurts: medians as robust thresholds for losses and gradients, which are to find NaN; signs of masks, levels and quantised
#   weights: code that was right is wrong from the day it is compiled.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile numba==0.68.1 numpy==2.4.6
cat > "$dir/check.py" <<'PY'
import numpy as np
from numba import njit

losses = np.random.default_rng(0).standard_normal(9)
losses[3] = np.nan
for name in ("median", "mean", "max"):
    function = getattr(np, name)
    compiled = njit(eval(f"lambda x: np.{name}(x)", {"np": np}))(losses)
    print(f"np.{name}: NumPy {function(losses)}, Numba {compiled}")
    assert np.isnan(function(losses))
    assert np.isnan(compiled) == (name != "median"), "the behaviour has changed"

levels = np.array([0, 1, 127, 128, 200], np.uint8)
compiled = njit(lambda x: np.sign(x))(levels)
print(f"np.sign of {levels.tolist()}: NumPy {np.sign(levels).tolist()}, Numba {compiled.tolist()}")
assert np.sign(levels).tolist() == [0, 1, 1, 1, 1]
assert compiled.tolist() == [0, 1, 1, 255, 255], "the behaviour has changed"
PY
"$dir/venv/bin/python" -W ignore "$dir/check.py"
