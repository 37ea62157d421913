#!/bin/sh
# Question: a curve of 5,000 losses around 2.5 has one bad value at step 100: a NaN, an infinity, or a spike. It is smoothed
#   by a running mean over 50 steps, by scipy.ndimage.uniform_filter1d or bottleneck.move_mean. Which values are spoilt?
# Guess: the 50 whose window holds the bad value.
# Seen (scipy 1.17.1, bottleneck 1.6.0, numpy 2.4.6): all until the end of the curve. Both add the newest value to a sum and
#   subtract the oldest. After a NaN, SciPy's curve is NaN for good, and after an infinity both are. What a spike rounds
#   away is never put back: after 1e8, bottleneck's fp32 curve is 0.06 too high to the end; after 1e16, both fp64 curves are
#   0.02 too high; after 1e20, they run at 0. bottleneck.move_std is worst: after a spike of 1e12 in fp64 it is 1,638 to
#   the end, where 0.05 is right. pandas' rolling mean, with compensated sums, is right in all these cases.
# Hurts: smoothed losses, gradient norms and throughput of runs with a spike: all later points of the figure are shifted or
#   missing. Use pandas' rolling(50).mean(), or np.convolve, which sums each window anew.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile scipy==1.17.1 bottleneck==1.6.0 pandas==3.1.1 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import bottleneck
import numpy as np
import pandas as pd
from scipy.ndimage import uniform_filter1d

window = 50
curve = 2.5 + 0.05 * np.random.default_rng(0).standard_normal(5000)
smooth = {
    "scipy": lambda values: uniform_filter1d(values, window),
    "bottleneck": lambda values: bottleneck.move_mean(values, window),
    "pandas": lambda values: pd.Series(values).rolling(window).mean().to_numpy(),
    "convolve": lambda values: np.convolve(values, np.ones(window) / window, "valid"),
    "move_std": lambda values: bottleneck.move_std(values, window),
}
right = {name: function(curve)[300:4900].mean() for name, function in smooth.items()}
seen = {}
for dtype in (np.float64, np.float32):
    for bad in (np.nan, np.inf, 1e8, 1e12, 1e16, 1e20):
        values = curve.astype(dtype)
        values[100] = bad
        for name, function in smooth.items():
            late = function(values)[300:4900]  # windows without the bad value
            seen[name, dtype, bad] = late.mean() - right[name]
        errors = ", ".join(f"{name} {seen[name, dtype, bad]:+.4f}" for name in smooth)
        print(f"{np.dtype(dtype).name}, {bad:g} at step 100; errors of steps 300 to 4,900: {errors}")
        assert abs(seen["pandas", dtype, bad]) < 1e-4 and abs(seen["convolve", dtype, bad]) < 1e-4
wide, narrow = np.float64, np.float32
assert np.isnan([seen["scipy", wide, np.nan], seen["scipy", wide, np.inf], seen["bottleneck", wide, np.inf]]).all()
assert seen["bottleneck", narrow, 1e8] > 0.05 and seen["scipy", wide, 1e16] > 0.01, "the behaviour has changed"
assert seen["bottleneck", wide, 1e20] < -2 and seen["scipy", wide, 1e20] < -2, "the behaviour has changed"
assert seen["move_std", wide, 1e12] > 1000, "the behaviour of move_std has changed"
PY
