#!/bin/sh
# Needs an Ada, Hopper or newer GPU. PYTHON: a Python with torch 2.11 for CUDA (seen with 2.11.0, CUDA 13.0, H200).
#
# Question: what does a number beyond the largest e4m3 number (448) become after .to(torch.float8_e4m3fn)?
# Guess: NaN or 448, but the same in eager mode and under torch.compile.
# Seen: eager mode gives NaN from 465 on; compiled code gives 448, even for infinity. With e5m2, 1e6 becomes infinity in
#   eager mode and 57,344 in compiled code. So a check for NaN detects an overflow in eager mode, but not in compiled
#   code. On the CPU, torch 2.13.0 gives 448 in both modes, for infinity too, and numpy (ml_dtypes) NaN.
# Hurts: FP8 training with delayed or static scaling, where an activation can exceed the scale. Divergence then shows in
#   only one mode, and tests in eager mode say nothing about the compiled model.
set -eu
"${PYTHON:-python3}" - <<'PY'
import math

import torch

values = torch.tensor([448.0, 464.0, 465.0, 1e6, torch.inf], device="cuda")
seen = {}
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    cast = torch.compile(lambda x, dtype=dtype: x.to(dtype), fullgraph=True)
    seen[dtype] = values.to(dtype).float().tolist(), cast(values).float().tolist()
    print(f"{dtype} of {values.tolist()}: eager {seen[dtype][0]}, compiled {seen[dtype][1]}")
eager, compiled = seen[torch.float8_e4m3fn]
assert eager[:2] == [448, 448] and all(map(math.isnan, eager[2:])), "the eager cast has changed"
assert compiled == [448.0] * 5, "the compiled cast has changed"
eager, compiled = seen[torch.float8_e5m2]
assert eager[3:] == [math.inf] * 2 and compiled[3:] == [57344.0] * 2, "the behaviour has changed"
PY
