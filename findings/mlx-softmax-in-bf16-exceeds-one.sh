#!/bin/sh
# Question: MLX computes mx.softmax of logits in bf16, over GPT-2's vocabulary of 50,304, on the CPU. What is the sum of
#   the probabilities?
# Guess: 1, to the precision of bf16 (0.4%). The sum is taken in fp32.
# Seen (mlx 0.32.4, its CPU backend on Linux): about 3 for random logits with a standard deviation of 2, and 197 for
#   equal logits, each of which gets 1/256: sums in bf16 stop at 256, where 256 + 1 is 256. In fp16, equal logits give
#   25. fp32 and precise=True give 1. The losses of mlx.nn, which use logsumexp, and mx.fast's attention are right.
# Hurts: sampling and distillation from probabilities, routers and own attention over more than a few hundred entries:
#   probabilities are too large by a factor that depends on the logits. Rows of 100 are right, so small tests pass.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'mlx[cpu]==0.32.4' numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
logits = mx.array(2 * np.random.default_rng(0).standard_normal((4, 50304)), dtype=mx.float32)
cases = {"random logits": logits, "equal logits": mx.zeros((1, 50304)), "100 equal logits": mx.zeros((1, 100))}
seen = {}
for name, values in cases.items():
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        sums = []
        for precise in (False, True):
            probabilities = mx.softmax(values.astype(dtype), axis=-1, precise=precise)
            sums.append(np.array(probabilities.astype(mx.float32)).sum(axis=-1).max())
        seen[name, dtype] = sums
        print(f"{name}, {dtype}: largest sum of probabilities {sums[0]:.3f}, with precise=True {sums[1]:.3f}")
for (name, dtype), (plain, precise) in seen.items():
    assert abs(precise - 1) < 0.01
    if dtype == mx.float32 or name == "100 equal logits":
        assert abs(plain - 1) < 0.01
assert seen["random logits", mx.bfloat16][0] > 2 and seen["equal logits", mx.bfloat16][0] > 100, "the behaviour has changed"
PY
