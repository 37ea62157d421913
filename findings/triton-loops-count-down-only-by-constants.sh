#!/bin/sh
# Question: a Triton kernel for a recurrence walks over time in both directions: for t in range(first, last, step), with
#   step = 1 in the forward pass and -1 in the backward pass, given as an argument. Does it count down?
# Guess: yes, as Python's range does. Triton's interpreter gives the right result.
# Seen (triton 3.9.0, compiled for sm_90, and the interpreter): compiled, the loop has no round at all, without a message.
#   Its condition is t < last whatever the sign of step. If step is tl.constexpr, or -1 stands in the code, it counts
#   down. With a step of 0, Python raises, and the compiled loop would not end.
# Hurts: scans, recurrent layers and backward passes over chunks whose direction is an argument: the output is what was
#   there before, or the initial state. Tests in the interpreter pass.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
  "$PYTHON" -m pip install --quiet --no-compile --no-deps triton==3.9.0
fi
cat > "$dir/check.py" <<'PY'
import os
import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def of_argument(out, first, last, step):
    seen = 0
    for t in range(first, last, step):
        seen = seen * 10 + t
    tl.store(out, seen)


def of_constant(out, first, last, step: tl.constexpr):
    seen = 0
    for t in range(first, last, step):
        seen = seen * 10 + t
    tl.store(out, seen)


def compiled(function, step):
    """The loop in Triton's code, and the comparisons of numbers in the code for an H100."""
    types = {"out": "*i32", "first": "i32", "last": "i32", "step": step}
    constants = {"step": -1} if step == "constexpr" else {}
    kernel = triton.compile(ASTSource(triton.jit(function), types, constants), target=GPUTarget("cuda", 90, 32))
    loop = re.search(r"scf\.for \S+ = (\S+) to (\S+) step (\S+)", kernel.asm["ttir"]).groups()
    return loop, re.findall(r"setp\.(\w+)\.s32", kernel.asm["ptx"])


if os.environ.get("TRITON_INTERPRET") == "1":
    for step in (1, -1):
        out = torch.zeros(1, dtype=torch.int32)
        triton.jit(of_argument)[(1,)](out, *((1, 4) if step == 1 else (3, 0)), step)
        print(f"interpreter, step {step}: the rounds are {out.item()}")
        assert out.item() == (123 if step == 1 else 321)
else:
    (first, last, step), comparisons = compiled(of_argument, "i32")
    print(f"compiled, step as an argument: from {first} while below {last}, step {step}; comparisons {comparisons}")
    assert (first, step) == ("%first", "%step") and set(comparisons) <= {"lt", "ge"}, "the behaviour has changed"
    (first, last, step), _ = compiled(of_constant, "constexpr")
    print(f"compiled, step as a constant: turned into a loop from {first} to {last}, step {step}")
    assert (first, step) == ("%last", "%c1_i32")
PY
"$PYTHON" -W ignore "$dir/check.py"
TRITON_INTERPRET=1 "$PYTHON" -W ignore "$dir/check.py"
