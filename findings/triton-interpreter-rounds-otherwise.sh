#!/bin/sh
# Question: Triton kernels are tested on a CPU by its interpreter, TRITON_INTERPRET=1. A kernel computes in fp32 and
#   stores bf16 or fp8, or multiplies bf16 blocks by tl.dot. Are the results those of a GPU, up to the order of sums?
# Guess: yes. Casts round to the nearest number, as documented, and what the interpreter cannot do is an error.
# Seen (triton 3.9.0, torch 2.13.0): stored bf16 numbers are cut off towards zero: half of them differ from torch's, all
#   of these are too small. Stored e4m3 numbers: NaN becomes 384, 500 becomes 256. tl.dot of bf16 blocks multiplies their
#   bits as integers, so its result is wrong by a factor of 1e9, and tl.sum of 4,096 ones in bf16 is 0. Only Triton's
#   page on debugging says that bf16 is not supported; nothing is raised. fp16 and fp32 are right.
# Hurts: tests in CI without a GPU: a kernel is "less exact" than its reference for no reason of its own, tolerances are
#   widened, and sums of rounded results drift. Cast bf16 inputs to fp32 after loading, and let torch round the outputs.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
  "$PYTHON" -m pip install --quiet --no-compile --no-deps triton==3.9.0
fi
cat > "$dir/kernels.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def total(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), 0))


def run_cast(x, dtype):
    out = torch.zeros(len(x), dtype=dtype)
    cast[(1,)](x, out, len(x))
    return out.float()


torch.manual_seed(0)
x = torch.randn(1024)
seen = {}
for dtype in (torch.float16, torch.bfloat16):
    out, right = run_cast(x, dtype), x.to(dtype).float()
    other = out != right
    smaller = (out.abs() < right.abs())[other].float().mean().item() if other.any() else 0.0
    a, b = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype)
    product, ones = torch.zeros(64, 64), torch.zeros(1)
    dot[(1,)](a, b, product, 64)
    total[(1,)](torch.ones(4096, dtype=dtype), ones, 4096)
    error = ((product - a.float() @ b.float()).norm() / (a.float() @ b.float()).norm()).item()
    seen[dtype] = other.float().mean().item(), smaller, error, ones.item()
    print(f"{dtype}: {seen[dtype][0]:.0%} of stored numbers differ from torch's ({smaller:.0%} of these are smaller); "
          f"tl.dot is {error:.1e} off; the sum of 4,096 ones is {ones.item():.0f}")
special = torch.tensor([1.0, 448.0, 500.0, torch.nan])
e4m3 = run_cast(special, torch.float8_e4m3fn)
print(f"e4m3 of {special.tolist()}: {e4m3.tolist()}")
assert seen[torch.float16][0] == 0 and seen[torch.float16][2] < 1e-5 and seen[torch.float16][3] == 4096
assert 0.4 < seen[torch.bfloat16][0] < 0.6 and seen[torch.bfloat16][1] == 1, "the behaviour has changed"
assert seen[torch.bfloat16][2] > 1e6 and seen[torch.bfloat16][3] == 0, "the behaviour has changed"
assert e4m3[0] == 1 and e4m3[2:].tolist() == [256, 384], "the behaviour of e4m3 has changed"
PY
TRITON_INTERPRET=1 "$PYTHON" -W ignore "$dir/kernels.py"
