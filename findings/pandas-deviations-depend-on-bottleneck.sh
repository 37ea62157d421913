#!/bin/sh
# Question: pandas has a column of 10 million fp32 losses around 10. What is its standard deviation, and does it matter
#   whether the package bottleneck is installed, which pandas' documentation recommends for speed?
# Guess: it is right, and the package only makes it faster.
# Seen (pandas 3.1.1, bottleneck 1.6.0): with bottleneck, Series.std() is 0.70 instead of 0.29, and Series.var() 0.49
#   instead of 0.083, while mean() is right. bottleneck takes the mean in a single fp32 sum, which loses digits; pandas
#   avoids bottleneck's sums and means for this reason, but not its deviations. Of 1 million values around 100, it is
#   0.95, of 40 million around 10, 3.4. Nothing warns. groupby().std() is right in the same process.
# Hurts: standard deviations and error bars of per-token losses and activations: they depend on a package that xarray or
#   another tool has installed, and grow with the number of tokens. Convert to fp64, or set
#   pd.set_option("compute.use_bottleneck", False).
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile pandas==3.1.1 bottleneck==1.6.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np
import pandas as pd

seen = {}
for center, size in ((10, 1_000_000), (100, 1_000_000), (10, 10_000_000), (10, 40_000_000)):
    losses = pd.Series(np.random.default_rng(0).random(size, dtype=np.float32) + np.float32(center))
    true = losses.to_numpy().std(dtype=np.float64, ddof=1)
    with pd.option_context("compute.use_bottleneck", False):
        without = losses.std()
    seen[center, size] = losses.std(), without, losses.groupby(np.zeros(size, np.int8)).std().item()
    assert abs(losses.mean() - center - 0.5) < 1e-3
    print(f"{size:,} values from {center} to {center + 1}: std {seen[center, size][0]:.3f}, without bottleneck "
          f"{without:.3f}, of a group {seen[center, size][2]:.3f}, in fp64 {true:.3f}")
    assert abs(without / true - 1) < 1e-3 and abs(seen[center, size][2] / true - 1) < 1e-3
assert seen[10, 10_000_000][0] > 0.6 and seen[100, 1_000_000][0] > 0.8, "the behaviour has changed"
assert seen[10, 40_000_000][0] > 3, "the behaviour has changed"
PY
