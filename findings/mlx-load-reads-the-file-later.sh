#!/bin/sh
# Question: old = mx.load("model.safetensors"); the model is trained on and saved to the same path; then |new - old| is
#   computed, to see how far the weights went. What is it?
# Guess: the change since the last save.
# Seen (mlx 0.32.4, CPU): zero. mx.load only notes where each array is in the file, and the bytes are read when an array is
#   first used; so "old" is what the file has by then. Models behave alike: load_weights of a file that is written again
#   before the first forward gives the later weights. .npy files are lazy too; .npz and GGUF are read at once. mx.eval(old)
#   right after the load gives the old values.
# Hurts: reference models, averages of weights, comparisons and restored "best" weights while the file is written again. No
#   message comes, since the file is complete and its shapes fit.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'mlx[cpu]==0.32.4' numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np

folder = sys.argv[1]
mx.random.seed(0)
path = f"{folder}/model.safetensors"
model = nn.Linear(64, 64)
for evaluated in (False, True):
    model.save_weights(path)
    old = mx.load(path)
    reference = nn.Linear(64, 64)
    reference.load_weights(path)
    if evaluated:
        mx.eval(old, reference.parameters())
    model.weight = model.weight + 1  # training
    model.save_weights(path)
    change = mx.abs(model.weight - old["weight"]).max().item()
    of_model = mx.abs(model.weight - reference.weight).max().item()
    print(f"evaluated after the load: {evaluated}; change by mx.load {change:.2f}, "
          f"by a loaded model {of_model:.2f}; right 1")
    assert np.allclose((change, of_model), 1 if evaluated else 0, atol=1e-5), "the behaviour has changed"

ones, twos = np.ones(1000, np.float32), np.full(1000, 2, np.float32)
save = {
    "npy": lambda path, array: mx.save(path, mx.array(array)),
    "npz": lambda path, array: mx.savez(path, a=mx.array(array)),
    "gguf": lambda path, array: mx.save_gguf(path, {"a": mx.array(array)}),
    "safetensors": lambda path, array: mx.save_safetensors(path, {"a": mx.array(array)}),
}
seen = {}
for kind, write in save.items():
    write(f"{folder}/array.{kind}", ones)
    loaded = mx.load(f"{folder}/array.{kind}")
    write(f"{folder}/array.{kind}", twos)
    seen[kind] = (loaded if kind == "npy" else loaded["a"])[0].item()
print("first element, 1 when it was loaded, 2 written later:", seen)
assert seen == {"npy": 2, "npz": 1, "gguf": 1, "safetensors": 2}, "the behaviour has changed"
PY
