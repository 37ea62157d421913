#!/bin/sh
# Question: a kernel in NVIDIA's CuTe DSL or in Warp takes (i - 1) % stages for the stage before, in a ring of buffers, and
#   (i - 1) // stages for its round. What are they for i = 0?
# Guess: both languages are Python: -1 % 4 is 3 and -1 // 4 is -1. Or both are C's: -1 and 0.
# Seen (nvidia-cutlass-dsl 4.8.1, warp-lang 1.19.0, on a CPU): a mixture. // rounds down as in Python (-1), but % has the
#   sign as in C (-1), so (a // b) * b + a % b is not a: -5 for a = -1, b = 4. Floats are alike. In the CuTe DSL it also
#   depends on when a number is known: for a Python number or a constant, % is Python's (3), and it becomes C's when the
#   same value is an argument. So does (a < b) + (a < c): 2 for Python numbers, 1 for arguments. No message.
# Hurts: ring buffers, swizzles, and indices counted from the end: with constants in a test they are right, and with
#   dynamic sizes they read before the buffer.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile nvidia-cutlass-dsl==4.8.1 warp-lang==1.19.0 numpy==2.4.6
cat > "$dir/check.py" <<'PY'
import cutlass.cute as cute
import numpy as np
import warp as wp
from cutlass import Int32
from cutlass.cute.runtime import make_ptr

A, B = -1, 4


@cute.jit
def of_arguments(out: cute.Pointer, a: Int32, b: Int32):
    numbers = cute.make_tensor(out, cute.make_layout(4))
    numbers[0] = a // b
    numbers[1] = a % b
    numbers[2] = (a // b) * b + a % b
    numbers[3] = Int32((a < b) + (a < 100))


@cute.jit
def of_constants(out: cute.Pointer):
    numbers = cute.make_tensor(out, cute.make_layout(4))
    numbers[0] = A // B
    numbers[1] = A % B
    numbers[2] = (A // B) * B + A % B
    numbers[3] = (A < B) + (A < 100)


@wp.kernel
def in_warp(out: wp.array(dtype=int), a: int, b: int):
    out[0] = a // b
    out[1] = a % b
    out[2] = (a // b) * b + a % b


def cute_pointer(array):
    return make_ptr(Int32, array.ctypes.data, cute.AddressSpace.generic)


arguments, constants = np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.int32)
of_arguments(cute_pointer(arguments), A, B)
of_constants(cute_pointer(constants))
wp.config.quiet = True
out = wp.zeros(3, dtype=int, device="cpu")
wp.launch(in_warp, 1, [out, A, B], device="cpu")
python = [A // B, A % B, (A // B) * B + A % B, (A < B) + (A < 100)]
rows = {"Python": python, "CuTe DSL, constants": constants.tolist(), "CuTe DSL, arguments": arguments.tolist()}
for name, row in {**rows, "Warp, arguments": out.numpy().tolist()}.items():
    sums = f", two comparisons {row[3]}" if len(row) > 3 else ""
    print(f"{name}: a // b {row[0]}, a % b {row[1]}, (a // b) * b + a % b {row[2]}{sums}")
assert constants.tolist() == python == [-1, 3, -1, 2]
assert arguments.tolist() == [-1, -1, -5, 1], "the CuTe DSL has changed"
assert out.numpy().tolist() == [-1, -1, -5], "Warp has changed"
PY
WARP_CACHE_PATH="$dir/warp" "$dir/venv/bin/python" "$dir/check.py"
