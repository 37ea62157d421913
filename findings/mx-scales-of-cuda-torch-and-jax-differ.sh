#!/bin/sh
# Question: the scales of MX formats (MXFP8, MXFP4) are e8m0: powers of two. A kernel computes them by CUDA's header
#   cuda_fp8.h, its reference by torch.float8_e8m0fnu, JAX or NumPy by ml_dtypes. Do they agree?
# Guess: yes: the nearest power of two, and the smallest for 0.
# Seen (CUDA 13.5.37's header on the host, torch 2.13.0, ml_dtypes 0.6.0): no. CUDA rounds up: 1.1 becomes 2, where the
#   others round to the nearest (1). 0, the scale of a block of zeros, becomes 2**-127 in CUDA and torch, and NaN in
#   ml_dtypes. A negative number becomes its magnitude in the former, NaN in the latter. Infinity becomes 2**127 in CUDA
#   and NaN in the others.
# Hurts: tests of MX kernels against a reference: scales with a mantissa between 1 and 1.5 differ by a factor of 2, so the
#   elements of these blocks are rounded or cut off at other places. With ml_dtypes, which JAX uses, one block of zeros (of
#   a pruned or dead neuron) has the scale NaN, and makes the product NaN.
# Packages: needs g++; torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile numpy==2.4.6 ml_dtypes==0.6.0 \
  nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-cuda-cccl==13.3.5.0.6
if [ -z "${PYTHON:-}" ]; then
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0
fi
cat > "$dir/convert.cpp" <<'CPP'
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>

int main(int count, char** words) {
  for (int i = 1; i < count; ++i) std::printf("%.17g ", static_cast<float>(__nv_fp8_e8m0(std::strtof(words[i], nullptr))));
}
CPP
include=$(echo "$dir"/venv/lib/python3*/site-packages/nvidia/cu13/include)
g++ -O1 -I"$include" -I"$include/cccl" -o "$dir/convert" "$dir/convert.cpp"
numbers="1 1.1 1.4 1.5 1.9 3 0.75 0 -1 inf nan"
cuda=$("$dir/convert" $numbers)
numpy=$("$dir/venv/bin/python" - $numbers <<'PY'
import sys

import ml_dtypes
import numpy as np

numbers = np.array(sys.argv[1:], dtype=np.float32).astype(ml_dtypes.float8_e8m0fnu)
print(*numbers.astype(np.float32).tolist())
PY
)
"$PYTHON" - "$numbers" "$cuda" "$numpy" <<'PY'
import math
import sys

import torch

numbers, cuda, numpy = ([float(word) for word in words.split()] for words in sys.argv[1:])
in_torch = torch.tensor(numbers).to(torch.float8_e8m0fnu).float().tolist()
for row in zip(numbers, cuda, in_torch, numpy, strict=True):
    print("{:g}: CUDA {:g}, torch {:g}, ml_dtypes {:g}".format(*row))


def same(found, expected):
    return all(a == b or math.isnan(a) and math.isnan(b) for a, b in zip(found, expected, strict=True))


nan, least = math.nan, torch.tensor(2.0**-127).item()
assert same(cuda, [1, 2, 2, 2, 2, 4, 1, least, 1, 2.0**127, nan]), "CUDA has changed"
assert same(in_torch, [1, 1, 1, 2, 2, 4, 1, least, 1, nan, nan]), "torch has changed"
assert same(numpy, [1, 1, 1, 2, 2, 4, 1, nan, nan, nan, nan]), "ml_dtypes has changed"
PY
