#!/bin/sh
# Question: fp16 activations of 10,000 tokens, all between 1 and 1.5, are analysed with numpy, array.std(axis=0) for each
#   neuron. Is it right, up to the rounding of fp16? And np.nanmean(axis=0), np.average with weights?
# Guess: yes. np.mean sums fp16 in fp32, as documented, and std begins with the mean.
# Seen (numpy 2.4.6): the mean is 1.25, as it should be, and the standard deviation 0.64 instead of 0.145: more than the
#   values' range. std and var have a mean of their own, whose sum is in fp16 and stops at 4,096. nanmean and average say
#   0.41, nanstd 0.64. At 4,096 tokens, std is twice too large; without axis, sums are made in pieces and are right up to
#   10,000 tokens, and overflow later. Nothing warns. The documentation of std says that it computes in the precision of
#   its input, and warns of fp32. With dtype=np.float32, std is right.
# Hurts: statistics of activations, gradients and router scores that are stored in fp16 to save space: thresholds,
#   normalisation and outliers by standard deviations, more so with more tokens, while the means look right.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np

generator = np.random.default_rng(0)
functions = {
    "mean": lambda a: a.mean(axis=0),
    "std": lambda a: a.std(axis=0),
    "std, dtype=np.float32": lambda a: a.std(axis=0, dtype=np.float32),
    "std of all": lambda a: a.std(),
    "nanmean": lambda a: np.nanmean(a, axis=0),
    "nanstd": lambda a: np.nanstd(a, axis=0),
    "average": lambda a: np.average(a, axis=0, weights=np.ones(len(a), a.dtype)),
}
seen = {}
for tokens in (1_000, 4_096, 10_000):
    activations = (1 + 0.5 * generator.random((tokens, 4))).astype(np.float16)
    for name, function in functions.items():
        value, true = (float(np.ravel(function(a))[0]) for a in (activations, activations.astype(np.float64)))
        seen[tokens, name] = value / true
        print(f"{tokens} tokens, {name}: {value:.4f}, in fp64 {true:.4f}")
for name in ("mean", "std, dtype=np.float32", "std of all"):
    assert abs(seen[10_000, name] - 1) < 0.02
assert abs(seen[1_000, "std"] - 1) < 0.06
assert seen[4_096, "std"] > 1.5 and seen[10_000, "std"] > 3, "the behaviour has changed"
assert seen[10_000, "nanmean"] < 0.5 and seen[10_000, "average"] < 0.5, "the behaviour has changed"
PY
