#!/bin/sh
# Question: an array of 1,000 ones in bf16 (ml_dtypes, as JAX and safetensors give them to numpy). What is its mean?
# Guess: 1. np.mean uses fp32 for fp16 arrays, and matrix products of bf16 arrays are right.
# Seen (numpy 2.4.6, ml_dtypes 0.6.0): 0.256. np.sum adds in bf16, one by one, and stops at 256, where 256 + 1 is 256.
#   np.mean, np.average, np.std, np.var and np.cumsum are wrong too: the standard deviation of the ones is 0.5. In e4m3 a
#   sum stops at 16. fp16 arrays are right, and so are x @ x, np.linalg.norm and x.astype(np.float32).mean().
# Hurts: statistics of bf16 checkpoints and activations in numpy: means, shares of zeros (np.mean of a bf16 mask) and
#   variances are too small by factors that depend on the size of the array. There is no warning.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6 ml_dtypes==0.6.0
fi
"$PYTHON" - <<'PY'
import ml_dtypes
import numpy as np

seen = {}
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(1000, dtype)
    seen[np.dtype(dtype).name] = values = {
        "sum": float(np.sum(ones)),
        "mean": float(np.mean(ones)),
        "std": float(np.std(ones)),
        "norm": float(np.linalg.norm(ones)),
        "x @ x": float(ones @ ones),
        "mean in fp32": float(ones.astype(np.float32).mean()),
    }
    print(np.dtype(dtype).name, *(f"{name} {value:.4g}" for name, value in values.items()), sep=", ")
    assert values["x @ x"] == 1000 and values["mean in fp32"] == 1 and abs(values["norm"] - 1000**0.5) < 0.1
assert seen["float16"]["mean"] == 1 and seen["float16"]["std"] == 0
assert seen["bfloat16"]["sum"] == 256 and seen["bfloat16"]["std"] > 0.4, "the behaviour has changed"
assert seen["float8_e4m3fn"]["sum"] == 16, "the behaviour has changed"
PY
