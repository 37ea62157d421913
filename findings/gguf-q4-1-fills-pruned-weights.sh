#!/bin/sh
# Question: half of a model's weights were pruned to zero. It is quantised to Q4_0 (4.5 bits per weight) or to Q4_1 (5
#   bits), by the Python package gguf. How many zeros are left, and which has the smaller error?
# Guess: all zeros, in both. Q4_1 has the smaller error, since it has more bits.
# Seen (gguf 0.19.0): Q4_0 keeps all zeros; Q4_1 keeps 0.2%, and Q5_1 0.3%. Q4_1 spreads 16 numbers from a block's
#   smallest to its largest weight, and zero is none of them as a rule; every pruned weight gets an error of the size of
#   the others'. So Q4_1 is the worse: 9.5% off, where Q4_0 is 7.6% off; for dense weights it is the better. The same
#   holds for Q5_1 and Q5_0. Q8_0 and MXFP4 keep zeros.
# Hurts: pruned models: the loss after quantisation, and whoever counts zeros in the file or skips them. Use the types
#   whose name ends in _0.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile gguf==0.19.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import gguf
import numpy as np

generator = np.random.default_rng(0)
dense = (0.02 * generator.standard_normal((64, 4096))).astype(np.float32)
pruned = np.where(np.abs(dense) < np.median(np.abs(dense)), 0, dense)  # by magnitude
random = np.where(generator.random(dense.shape) < 0.5, 0, dense)
seen = {}
for name, weights in (("dense", dense), ("half pruned at random", random), ("half pruned by magnitude", pruned)):
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        quantisation = gguf.GGMLQuantizationType[kind]
        back = gguf.dequantize(gguf.quantize(weights, quantisation), quantisation)
        error = float(np.linalg.norm(back - weights) / np.linalg.norm(weights))
        zeros = float((back[weights == 0] == 0).mean()) if (weights == 0).any() else 1.0
        seen[name, kind] = error, zeros
        print(f"{name}, {kind}: {error:.1%} off, {zeros:.1%} of the zeros kept")
assert seen["dense", "Q4_1"][0] < seen["dense", "Q4_0"][0]
for name in ("half pruned at random", "half pruned by magnitude"):
    assert all(seen[name, kind][1] == 1 for kind in ("Q4_0", "Q5_0", "Q8_0", "MXFP4"))
    assert seen[name, "Q4_1"][1] < 0.05 and seen[name, "Q5_1"][1] < 0.05, "the behaviour has changed"
    assert seen[name, "Q4_1"][0] > seen[name, "Q4_0"][0], "Q4_1 is the better now"
PY
