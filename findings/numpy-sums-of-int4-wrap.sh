#!/bin/sh
# Question: a weight is quantised to int4 (ml_dtypes, as JAX and ONNX give it to NumPy). What are its sum, mean and std?
# Guess: those of the numbers. NumPy sums small integers, int8 too, in 64 bits, and means in fp64.
# Seen (numpy 2.4.6, ml_dtypes 0.6.0): the sum wraps within 4 bits: -692 becomes -4. The mean and the standard deviation are
#   0, of type int4: the wrapped sum divided by the number, rounded towards 0. uint4 and int2 do the same, and products
#   u * u of uint4 too. A matrix product of int4 matrices is int8, and wraps as int8 does in NumPy. sum(dtype=np.int64) and
#   mean(dtype=np.float32) are right, and so are counts such as (q == 0).sum().
# Hurts: checks of quantised checkpoints (a bias of the rounding, mean and std per channel, checksums of rows, zero points
#   corrected by sums): all look centred at 0, whatever the weights are. Convert with .astype(np.int8) first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6 ml_dtypes==0.6.0
fi
"$PYTHON" -W error - <<'PY'
import ml_dtypes
import numpy as np

int8 = np.random.default_rng(0).integers(-8, 8, 1_000, dtype=np.int8)
uint8 = (int8 + 8).astype(np.uint8)


def statistics(array):
    mean = array.mean()
    return {"sum": int(array.sum()), "mean": float(mean), "std": float(array.std()), "type": mean.dtype.name}


seen = {
    "int8": statistics(int8),
    "int4": statistics(int8.astype(ml_dtypes.int4)),
    "uint8": statistics(uint8),
    "uint4": statistics(uint8.astype(ml_dtypes.uint4)),
}
for kind, values in seen.items():
    print(kind, values)
q = int8.astype(ml_dtypes.int4)
print(f"sum(dtype=int64) {q.sum(dtype=np.int64)}, mean(dtype=float32) {q.mean(dtype=np.float32):.3f}")
assert q.sum(dtype=np.int64) == seen["int8"]["sum"] and abs(q.mean(dtype=np.float32) - seen["int8"]["mean"]) < 1e-4
assert (q == 0).sum() == (int8 == 0).sum() and (q.astype(np.int8) == int8).all()
for narrow, wide in (("int4", "int8"), ("uint4", "uint8")):
    assert seen[wide]["std"] > 4 and abs(seen[wide]["sum"]) > 16
    assert (seen[narrow]["sum"] - seen[wide]["sum"]) % 16 == 0 and -8 <= seen[narrow]["sum"] < 16
    assert seen[narrow]["mean"] == seen[narrow]["std"] == 0, "the behaviour has changed"
PY
