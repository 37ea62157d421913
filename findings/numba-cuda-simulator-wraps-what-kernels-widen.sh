#!/bin/sh
# Question: tests of a numba-cuda kernel run in its simulator (NUMBA_ENABLE_CUDASIM=1) on machines without a GPU. Does it
#   compute what the kernel computes, for integers of 8 and 32 bits, fp32 and NaN?
# Guess: yes, but for races and speed.
# Seen (numba-cuda 0.30.4, numba 0.68.1, NumPy 2.4.6): no. The simulator runs the function on NumPy's numbers, which keep
#   their type: 200 + 200 of uint8 is 144, 0 - 1 is 255, 100,000 squared of int32 is 1,410,065,408, and 1 + 1e-9 of fp32 is
#   1. The compiled kernel widens integers to 64 bits and fp32 to fp64 beside a literal: 400, -1, 10,000,000,000, and
#   1.000000001. max(NaN, 3) is NaN in the simulator, and 3 by the kernel's max instruction.
# Hurts: kernels for token ids, masks, counters, packed indices and quantised weights: a test passes for a kernel that is
#   wrong on the GPU, or fails for one that is right. NumPy only warns of overflow, and not for arrays.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile 'numba-cuda[cu13]==0.30.4' numba==0.68.1 numpy==2.4.6
cat > "$dir/check.py" <<'PY'
import os
import warnings

import numpy as np
from numba import cuda, types


def add_bytes(x, out):
    out[0] = x[0] + x[0]


def subtract_bytes(x, out):
    out[0] = x[1] - x[2]


def square(x, out):
    out[0] = x[0] * x[0]


def add_small(x, out):
    out[0] = x[0] + 1e-9


def larger(x, out):
    out[0] = max(x[0], x[1])


CASES = (  # function, input, type of the result, what the simulator gives, what the compiled kernel does
    (add_bytes, np.array([200], np.uint8), np.int64, 144, "mul.wide.u32"),  # times 2
    (subtract_bytes, np.array([0, 0, 1], np.uint8), np.int64, 255, "sub.s64"),
    (square, np.array([100_000], np.int32), np.int64, 1_410_065_408, "mul.wide.s32"),
    (add_small, np.array([1], np.float32), np.float64, 1.0, "add.f64"),
    (larger, np.array([np.nan, 3], np.float32), np.float32, np.nan, "max.f32"),
)
warnings.simplefilter("ignore")
for function, x, kind, simulated, instruction in CASES:
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        out = np.zeros(1, kind)
        cuda.jit(function)[1, 1](x, out)
        print(f"simulator, {function.__name__}: {out[0]}")
        assert np.array_equal(out, [simulated], equal_nan=True), "the behaviour has changed"
    else:
        arrays = [getattr(types, np.dtype(dtype).name)[::1] for dtype in (x.dtype, kind)]
        code, _ = cuda.compile_ptx(function, tuple(arrays), cc=(9, 0))
        print(f"kernel for an H100, {function.__name__}: has {instruction}: {instruction in code}")
        assert instruction in code, "the behaviour has changed"
PY
"$dir/venv/bin/python" "$dir/check.py"
NUMBA_ENABLE_CUDASIM=1 "$dir/venv/bin/python" "$dir/check.py"
