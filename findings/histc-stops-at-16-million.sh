#!/bin/sh
# Question: how many zeros does torch.histc count among 40 million?
# Guess: 40 million. Sums over as many fp32 numbers are right, since they are summed in parts.
# Seen (torch 2.13.0, one CPU thread): 16,777,216 = 2^24. A bin is a number of the input's dtype, to which 1 is added;
#   from there on, adding 1 changes nothing. torch.histogram does the same. In bf16, a bin stops at 256, in fp16 at
#   2,048. Each further thread counts as far again, so the result depends on the number of threads. (x == 0).sum(),
#   torch.bincount and numpy.histogram count right.
# Hurts: histograms of activations, gradients and weights. One layer of 2,048 hidden units has 33 million activations in
#   a micro-batch of 16,384 tokens. If most are zero, the share of zeros comes out too small, without a warning.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import numpy as np
import torch

torch.set_num_threads(1)
seen = {}
for dtype, size in ((torch.float32, 40_000_000), (torch.bfloat16, 10_000), (torch.float16, 10_000)):
    zeros = torch.zeros(size, dtype=dtype)
    counts = torch.histc(zeros, 4, -1, 1)
    seen[dtype] = counts.sum().item()
    print(f"{dtype}: torch.histc counts {seen[dtype]:,.0f} of {size:,} zeros, in {counts.dtype}")
zeros = torch.zeros(40_000_000)
histogram = torch.histogram(zeros, 4, range=(-1.0, 1.0)).hist.sum().item()
print(f"torch.histogram: {histogram:,.0f}; (x == 0).sum(): {int((zeros == 0).sum()):,}")
assert np.histogram(zeros.numpy(), 4, (-1, 1))[0].sum() == (zeros == 0).sum() == 40_000_000
assert torch.bincount(zeros.int()).item() == 40_000_000
assert list(seen.values()) == [2**24, 256, 2048] and histogram == 2**24, "the behaviour has changed"
PY
