#!/bin/sh
# Question: does Triton's tl.sum of bf16 or fp16 numbers add in fp32, as torch.sum does?
# Guess: yes. Integers below 32 bits are widened to 32 bits, and small floats are widened too.
# Seen (triton 3.9.0, compiled for sm_90): int8 is widened, bf16 and fp16 are not. The kernel consists of add.bf16 or
#   add.f16, even if the result is stored in fp32, and tl.cumsum does the same. The docstring says that types other than
#   integers "are kept as-is". With tl.sum(x, dtype=tl.float32), all additions are in fp32.
# Hurts: norms, losses and counts over a row in bf16: each addition rounds to eight bits. In fp16, the sum of 1,024 squares
#   is infinite once they exceed 64 on average. The same code in torch adds in fp32, so the kernel looks like a port of it.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile --no-deps triton==3.9.0
cat > "$dir/check.py" <<'PY'
import collections
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def total(x_ptr, out_ptr, dtype: tl.constexpr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), dtype=dtype))


@triton.jit
def running(x_ptr, out_ptr, dtype: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.cumsum(tl.load(x_ptr + i), dtype=dtype))


def additions(kernel, of, dtype):
    """The additions of numbers in the kernel, which stores its result in fp32, by their type."""
    signature = {"x_ptr": "*" + of, "out_ptr": "*fp32", "dtype": "constexpr", "N": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"dtype": dtype, "N": 1024})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    counts = collections.Counter(re.findall(r"^\s*add\.(?:rn\.)?((?:bf16|f16|f32|s32)(?:x2)?)\b", ptx, re.M))
    return {kind: count for kind, count in counts.items() if of == "i8" or kind != "s32"}


for kernel in (total, running):
    for of in ("bf16", "fp16", "i8"):
        kept, widened = additions(kernel, of, None), additions(kernel, of, tl.float32)
        print(f"{kernel.__name__} of {of}: {kept}; with dtype=tl.float32: {widened}")
        small = {"bf16": {"bf16", "bf16x2"}, "fp16": {"f16", "f16x2"}, "i8": {"s32"}}[of]
        assert kept and set(kept) <= small, "the behaviour has changed"
        assert "f32" in widened
PY
TRITON_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" -W ignore "$dir/check.py"
