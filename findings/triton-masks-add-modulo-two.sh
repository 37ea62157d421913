#!/bin/sh
# Question: in a Triton kernel, (x > 0) + (x > 1) + (x > 2) counts how many thresholds x exceeds. Does it?
# Guess: yes: comparisons are widened to int32 in arithmetic, as in tl.sum, and as they are in mask * 2 and mask - 1.
# Seen (triton 3.9.0): no. Two masks are added as numbers of one bit: true + true is false, and three true masks are true
#   again. mask - mask is the same, and -mask is mask. torch and NumPy make true + true true; Python makes it 2. With a
#   number (mask * 2) or in tl.sum and tl.cumsum, masks are widened, so some expressions count and others do not.
#   The interpreter agrees with the compiled code; neither raises anything.
# Hurts: counts of active neurons per strip, ranks by comparison, bucket numbers, and "at least one of" written with +:
#   wrong exactly where several conditions hold, which small tests seldom have. Convert masks with .to(tl.int32) first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile --no-deps triton==3.9.0
cat > "$dir/check.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def compute(x_ptr, out_ptr, what: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if what == "mask + mask":
        out = (x > 0) + (x > 1)
    elif what == "mask - mask":
        out = (x > 0) - (x > 1)
    elif what == "-mask":
        out = -(x > 0)
    elif what == "mask * 2 + mask":
        out = (x > 0) * 2 + (x > 1)
    elif what == "tl.cumsum(mask)":
        out = tl.cumsum(x > 0)
    tl.store(out_ptr + i, out)


for what, bits in {"mask + mask": 1, "mask - mask": 1, "-mask": 1, "mask * 2 + mask": 32, "tl.cumsum(mask)": 32}.items():
    signature = {"x_ptr": "*fp32", "out_ptr": "*i32", "what": "constexpr", "N": "constexpr"}
    source = ASTSource(fn=compute, signature=signature, constexprs={"what": what, "N": 128})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    operations = re.findall(r"= arith\.((?:add|sub)i) [^:]*: (?:tensor<128x)?i(\d+)", code)
    print(f"{what}: {', '.join(f'{name} of {width} bits' for name, width in operations)}")
    assert operations and all(int(width) == bits for _, width in operations), "the behaviour has changed"
PY
TRITON_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" -W ignore "$dir/check.py"
