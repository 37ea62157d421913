#!/bin/sh
# Question: a Triton kernel adds 1e-8 to bf16 numbers, or multiplies them by 1.5e-6. Which number does the GPU use?
# Guess: the nearest bf16 number, with an error of at most 0.4%: bf16 has the range of fp32, so 1e-8 and 1e-30 are fine.
# Seen (triton 3.9.0, compiled for sm_90): the literal is rounded to six decimals first. 1e-8 and 4.9e-7 become 0, 6e-7
#   becomes 1e-6, and 1.5e-6 becomes 2e-6, in +, * and tl.full. There is no message. fp32 and fp16 literals are right,
#   and so is a float that is an argument of the kernel, since bf16 times fp32 is computed in fp32.
# Hurts: kernels in bf16 with a small constant: x / (y + 1e-8) divides by zero, and a loss scale, a learning rate or an L1
#   coefficient is up to 100% off. Convert to fp32 after loading.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile --no-deps triton==3.9.0
cat > "$dir/check.py" <<'PY'
import re
import struct

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x_ptr, out_ptr, number: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + number)


@triton.jit
def fill(x_ptr, out_ptr, number: tl.constexpr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.full((N,), number, tl.bfloat16))


def constant(kernel, number, dtype):
    """The largest 16- or 32-bit constant of the compiled kernel, as a number."""
    signature = {"x_ptr": "*" + dtype, "out_ptr": "*" + dtype, "number": "constexpr", "N": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"number": number, "N": 128})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    if dtype == "fp32":
        return max(struct.unpack(">f", bytes.fromhex(bits))[0] for bits in re.findall(r"\b0f([0-9A-F]{8})\b", ptx))
    found = [int(bits, 0) for bits in re.findall(r"mov\.b16\s+%rs\d+, (0x[0-9A-F]+|-?\d+);", ptx)]
    if dtype == "bf16":
        return max(struct.unpack(">f", (bits & 0xFFFF).to_bytes(2, "big") + b"\0\0")[0] for bits in found)
    return max(struct.unpack(">e", (bits & 0xFFFF).to_bytes(2, "big"))[0] for bits in found)


seen = {}
for number in (1e-30, 1e-8, 4.9e-7, 6e-7, 1.5e-6, 1e-3):
    for kernel, dtype in ((add, "bf16"), (fill, "bf16"), (add, "fp32"), (add, "fp16")):
        seen[number, kernel.__name__, dtype] = constant(kernel, number, dtype)
    print(f"{number:g}:", ", ".join(f"{key[1]} {key[2]} {value:.3g}" for key, value in seen.items() if key[0] == number))
    assert abs(seen[number, "add", "fp32"] / number - 1) < 1e-6
    assert abs(seen[number, "add", "fp16"] - number) <= 2**-25 + number / 1000
    for kernel in ("add", "fill"):
        assert abs(seen[number, kernel, "bf16"] - round(number, 6)) <= number / 200, "the behaviour has changed"
PY
TRITON_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" -W ignore "$dir/check.py"
