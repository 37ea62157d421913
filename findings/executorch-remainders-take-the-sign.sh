#!/bin/sh
# Question: ExecuTorch runs a model whose integers go below zero: buckets of relative positions, (key - query) % 4, slots
#   of a ring buffer, (position - window) % length, hashed n-grams in int64 % buckets. What is -1 % 4?
# Guess: 3, as in torch and Python. // of negative integers is right too, so that x == x // 4 * 4 + x % 4.
# Seen (executorch 1.5.1, torch 2.13.0, portable kernels): -1. The remainder of integers has the sign of the first number,
#   as in C, for int32 and int64, by a number or a tensor, and there is no message. // and the remainder of floats are
#   right, so integers do not add up. x - x // 4 * 4 is right.
# Hurts: models for devices with such positions, caches or hashes: tokens below zero get another bucket or slot than the one
#   they were trained with, or an index below zero. Inputs that stay above zero, as in a short check, do not show it.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 executorch==1.5.1
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
from importlib.metadata import version

import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime

distances = torch.tensor([[-7, -1, 3, 8]])
hashes = torch.tensor([[-6_364_136_223_846_793_005, 1_442_695_040_888_963_407]])


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def lowered(function, inputs):
    program = to_edge(torch.export.export(Model(function).eval(), (inputs,))).to_executorch()
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    return method.execute([inputs])[0].clone()


cases = (
    ("x // 4", lambda x: x // 4, distances, None),
    ("x.float() % 4", lambda x: x.float() % 4, distances, None),
    ("x - x // 4 * 4", lambda x: x - x // 4 * 4, distances, None),
    ("x % 4", lambda x: x % 4, distances, [[-3, -1, 3, 0]]),
    ("x.int() % 4", lambda x: x.int() % 4, distances, [[-3, -1, 3, 0]]),
    ("x % tensor", lambda x: x % torch.tensor([4, 4, -4, -5]), distances, [[-3, -1, 3, 3]]),
    ("hashes % 1021", lambda x: x % 1021, hashes, [torch.fmod(hashes, 1021)[0].tolist()]),
)
print("executorch", version("executorch"))
for name, function, inputs, other in cases:
    wanted, seen = function(inputs).tolist(), lowered(function, inputs).tolist()
    print(f"{name}: torch {wanted}, ExecuTorch {seen}")
    assert seen == (other or wanted) and (other != wanted), "the behaviour has changed"
PY
