#!/bin/sh
# Question: a Triton kernel computes x % y of fp32 numbers, as for a position in a period or an angle modulo 2π. Is it the
#   fmod of CUDA, which is exact: with the sign of x, and smaller than y?
# Guess: yes. Triton documents that % of integers follows C, and its interpreter takes NumPy's exact fmod for floats.
# Seen (triton 3.9.0, compiled for sm_90): it is x - trunc(x / y) * y, whose quotient is rounded first. Where x / y rounds
#   up to a whole number, the remainder of positive numbers is negative: 1.0 % 0.1 is -1.5e-8 (fmod: 0.1), 4.2 % 0.7 is
#   -1.2e-7 (0.7). Of x made as k * y in fp32, 43% are below zero. 1e8 % 2π is -0.84 (5.44), and 1e9 % 0.1 is -14.9, 149
#   times y. The interpreter gives fmod's numbers, so tests on a CPU agree with torch.fmod.
# Hurts: indices and table lookups from x % y (-1 is out of bounds), periodic features, RoPE at long contexts, hashes of
#   floats. Seen as machine code: the compiled instructions are computed here with NumPy.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile numpy==2.4.6
"$dir/venv/bin/python" -m pip install --quiet --no-compile --no-deps triton==3.9.0
cat > "$dir/check.py" <<'PY'
import re

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def remainder(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) % tl.load(y_ptr + i))


signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "N": "constexpr"}
source = ASTSource(fn=remainder, signature=signature, constexprs={"N": 128})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
instructions = re.findall(r"^\s*((?:div|cvt|neg|fma|sub|mul|rem|call|testp|selp|add)\.\S*f32\S*)", ptx, re.M)
print("compiled:", ", ".join(instructions))
expected = ["div.rn.f32", "cvt.rzi.f32.f32", "neg.f32", "fma.rn.f32", "testp.infinite.f32", "selp.f32"]
assert instructions == expected, "the behaviour has changed"


def as_compiled(x, y):
    whole = np.trunc(x / y)  # div.rn.f32, cvt.rzi.f32.f32
    # fma.rn.f32: products and differences are exact in fp64 here, and are rounded once
    return (x.astype(np.float64) - whole.astype(np.float64) * y.astype(np.float64)).astype(np.float32)


for a, b in ((5.5, 2.0), (1.0, 0.1), (4.2, 0.7), (1e8, 2 * np.pi), (1e9, 0.1)):
    x, y = np.float32([a]), np.float32([b])
    found, exact = as_compiled(x, y)[0], np.fmod(x, y)[0]
    print(f"{a:g} % {b:g}: {found:.3g}, fmod {exact:.3g}")
    assert (found == exact) if a == 5.5 else found < 0
random = np.random.default_rng(0)
y = 10 * random.random(100_000, dtype=np.float32)
multiples = random.integers(1, 1000, 100_000).astype(np.float32) * y
below = (as_compiled(multiples, y) < 0).mean()
print(f"of k * y: {below:.0%} below zero (fmod {(np.fmod(multiples, y) < 0).mean():.0%})")
assert 0.4 < below < 0.46
PY
TRITON_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" -W ignore "$dir/check.py"
