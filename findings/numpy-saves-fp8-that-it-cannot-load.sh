#!/bin/sh
# Question: weights or gradients in bf16, fp8 or int4 are numpy arrays by ml_dtypes, as JAX gives them. np.save writes
#   one to a file. What does np.load return?
# Guess: the array, or np.save refuses a dtype that is not numpy's.
# Seen (numpy 2.4.6, ml_dtypes 0.6.0): np.save writes each without a message. Of float8_e5m2, the dtype of gradients,
#   np.load raises "descr is not a valid dtype descriptor": its header says <f1, which numpy does not know. bf16,
#   float8_e4m3fn, float4 and int4 come back as bytes of the dtypes V2 and V1, that have no arithmetic and do not name
#   their format, so e4m3fn, e4m3fnuz, e8m0fnu and int4 look alike. np.savez does the same. Reading the file's bytes
#   after the header and .view(dtype) give the values, to who knows the dtype.
# Hurts: saved gradients, activations and checkpoints in low precision: the loss is seen when they are read.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6 ml_dtypes==0.6.0
fi
"$PYTHON" - <<'PY'
import io

import ml_dtypes
import numpy as np

seen = {}
for name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2", "float4_e2m1fn", "int4"):
    array = np.array([0.5, 1, 2, 4]).astype(getattr(ml_dtypes, name))
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    try:
        loaded = np.load(file)
        assert (loaded.view(array.dtype) == array).all()
        seen[name] = loaded.dtype.str
    except ValueError as error:
        seen[name] = str(error)
        file.seek(0)
        raw = np.frombuffer(file.read()[-array.nbytes :], array.dtype)
        assert (raw == array).all()
    print(f"{name}: saved as dtype {array.dtype.str!r}, loaded as: {seen[name]}")
assert "not a valid dtype" in seen.pop("float8_e5m2"), "the behaviour has changed"
assert seen.pop("bfloat16") == "|V2" and set(seen.values()) == {"|V1"}, "the behaviour has changed"
PY
