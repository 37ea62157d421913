#!/bin/sh
# Question: gguf's quantize writes weights as MXFP4, in blocks of 32 with one scale. One weight of a block is NaN. What
#   does the block become?
# Guess: NaN, as in other formats: the scale of MXFP4 (e8m0) has a value for NaN, which OCP's specification asks for.
# Seen (gguf 0.19.0): 32 zeros, without a warning. The NaN disappears, and so do the 31 other weights of the block. With
#   infinity it is the same, with a warning of numpy. In Q8_0 and Q4_0 the block becomes NaN, and F16 and BF16 keep the
#   other weights.
# Hurts: checkpoints of runs that diverged, or weights that were damaged on the way: the converted model runs and
#   answers with parts of its weights gone, and a check of the converted file for NaN finds nothing.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile gguf==0.19.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize


def read_back(kind, weights):
    """What is read after writing, and how many warnings writing gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = quantize(weights, kind)
    with np.errstate(all="ignore"):
        return dequantize(written, kind), len(caught)


seen = {}
for value in (np.nan, np.inf):
    weights = np.ones((1, 64), np.float32)
    weights[0, 0] = value
    for kind in (Kind.MXFP4, Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.BF16):
        read, count = read_back(kind, weights)
        seen[value, kind] = finite, ones = bool(np.isfinite(read[0, 0])), int((np.abs(read[0] - 1) < 0.1).sum())
        print(f"{value} among 63 ones as {kind.name}: read as {read[0, :3]}, {ones} ones left, {count} warnings")
        if value is np.nan and kind is Kind.MXFP4:
            assert count == 0 and (read[0, :32] == 0).all(), "the behaviour has changed"
assert not any(finite for (_, kind), (finite, _) in seen.items() if kind is not Kind.MXFP4)
assert seen[np.nan, Kind.MXFP4] == (True, 32), "the behaviour has changed"
PY
