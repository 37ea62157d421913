#!/bin/sh
# Question: weights in bf16 (ml_dtypes, as JAX and orbax give them to NumPy) hold a NaN and an infinity. What
#   does np.nan_to_num return? And np.nanmean, np.median and np.sort?
# Guess: 0 and a large number instead of NaN and infinity; the mean of the others; NaN; NaN at the end. So for fp16.
# Seen (numpy 2.4.6, ml_dtypes 0.6.0): np.nan_to_num returns the array as it was, NaN and infinity included. np.nanmean and
#   np.nansum are NaN. np.median and np.quantile, NaN for fp16, are plausible numbers. np.sort leaves NaN in the middle,
#   and does not sort around them: [3, NaN, 1, 2] stays as it is. fp8 (e5m2, e4m3) does the same. NumPy repairs and
#   looks for NaN in subtypes of np.inexact only, and the types of ml_dtypes are none. np.isnan, np.max and np.nanmax
#   are right.
# Hurts: scripts that repair, merge, prune or check checkpoints: a repair of NaN does nothing, thresholds by np.quantile
#   hide that a layer is broken, and np.searchsorted searches an array that is not sorted. Use .astype(np.float32) first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6 ml_dtypes==0.6.0
fi
"$PYTHON" -W ignore - <<'PY'
import ml_dtypes
import numpy as np

weights = np.random.default_rng(0).standard_normal(1_000).astype(np.float32)
weights[[3, 200, 201, 700]] = np.nan
weights[5] = np.inf


def behaviour(array):
    sorted_array = np.sort(array).astype(np.float32)
    finite = sorted_array[~np.isnan(sorted_array)]
    return {
        "not finite after nan_to_num": int((~np.isfinite(np.nan_to_num(array))).sum()),
        "nanmean": float(np.nanmean(np.where(np.isinf(array), 0, array).astype(array.dtype))),
        "median": float(np.median(array)),
        "quantile(|w|, 0.9)": float(np.quantile(np.abs(array), 0.9)),
        "NaN at the end of the sorted array": bool(np.isnan(sorted_array[-4:]).all()),
        "descents in the sorted array": int((np.diff(finite) < 0).sum()),
    }


seen = {np.dtype(kind).name: behaviour(weights.astype(kind)) for kind in
        (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)}
for kind, values in seen.items():
    print(kind, values)
right = seen.pop("float16")
assert right["not finite after nan_to_num"] == 0 and np.isfinite(right["nanmean"])
assert np.isnan(right["median"]) and right["NaN at the end of the sorted array"]
for values in seen.values():
    assert values["not finite after nan_to_num"] == 5 and np.isnan(values["nanmean"]), "the behaviour has changed"
    assert np.isfinite(values["median"]) and np.isfinite(values["quantile(|w|, 0.9)"]), "the behaviour has changed"
    assert not values["NaN at the end of the sorted array"], "the behaviour has changed"
short = np.array([3, np.nan, 1, 2], ml_dtypes.bfloat16)
print("np.sort of", short, "in bf16:", np.sort(short))
assert np.sort(short).astype(float)[:3].tolist() != [1.0, 2.0, 3.0], "the behaviour has changed"
PY
