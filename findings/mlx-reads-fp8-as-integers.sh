#!/bin/sh
# Question: a checkpoint has weights in fp8 (F8_E4M3 in safetensors). MLX loads it, by mx.load or by model.load_weights.
#   What are the weights?
# Guess: it refuses a dtype that MLX does not have, as it refuses F8_E5M2, F4 and F64; or it converts them.
# Seen (mlx 0.32.4, CPU): the bytes, as uint8: 1.0 is 56, -1.0 is 184. F8_E8M0, the scales of MX formats, likewise: 1.0 is
#   127. load_weights compares names and shapes but no dtypes, and a linear layer multiplies by the bytes without a message.
#   The outputs have no relation to the right ones. mx.from_fp8 gives the values of E4M3 to those who know that it is fp8.
#   It is on purpose: before pull request 2985 of MLX, E4M3 was converted to bf16.
# Hurts: checkpoints with layers in fp8: a model that loads without an error and writes nonsense, or, where the
#   output is normalised, a plausible one.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'mlx[cpu]==0.32.4' ml_dtypes==0.6.0 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import json
import struct
import sys

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np

path = sys.argv[1] + "/model.safetensors"
generator = np.random.default_rng(0)
weight = generator.standard_normal((16, 64)).astype(np.float32)
tokens = generator.standard_normal((8, 64)).astype(np.float32)


def save(array, kind):
    """Write a safetensors file as the format's description says: the header's length, the header, the bytes."""
    header = {"weight": {"dtype": kind, "shape": array.shape, "data_offsets": [0, array.nbytes]}}
    header = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + array.tobytes())


seen = {}
kinds = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E5M2": "float8_e5m2"}
for kind, name in kinds.items():
    save(np.array([1, 2, 4]).astype(getattr(ml_dtypes, name)), kind)
    try:
        loaded = mx.load(path)["weight"]
        seen[kind] = str(loaded.dtype), loaded.astype(mx.float32).tolist()
    except RuntimeError as error:
        seen[kind] = "refused", str(error)
    print(f"{kind}: 1, 2 and 4 are loaded as {seen[kind]}")
assert seen["BF16"] == ("mlx.core.bfloat16", [1, 2, 4]) and seen["F8_E5M2"][0] == "refused"
assert seen["F8_E4M3"] == ("mlx.core.uint8", [56, 64, 72]), "the behaviour has changed"
assert seen["F8_E8M0"] == ("mlx.core.uint8", [127, 128, 129]), "the behaviour has changed"

fp8 = weight.astype(ml_dtypes.float8_e4m3fn)
save(fp8, "F8_E4M3")
layer = nn.Linear(64, 16, bias=False)
layer.load_weights(path)
output, right = np.array(layer(mx.array(tokens))), tokens @ fp8.astype(np.float32).T
correlation = np.corrcoef(output.ravel(), right.ravel())[0, 1]
print(f"outputs of the layer: {np.abs(output).mean():.0f} in the mean, right: {np.abs(right).mean():.0f}; "
      f"correlation {correlation:.2f}")
assert abs(correlation) < 0.6, "the behaviour has changed"
assert np.array_equal(np.array(mx.from_fp8(layer.weight, mx.float32)), fp8.astype(np.float32))
PY
