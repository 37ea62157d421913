#!/bin/sh
# Question: in NVIDIA's CuTe DSL, a jitted function calls a small helper inside `if n > 0` or a loop over n, where n is an
#   argument. The helper sets a flag of an object or counts up a list's number. What is its value afterwards?
# Guess: as in Python, or an error: the DSL refuses the same assignment without the helper.
# Seen (nvidia-cutlass-dsl 4.8.1, on a CPU): neither, without a message. While the code is traced, each helper runs once:
#   also in the branch that is not taken, and once per loop, whatever n is. After if/else, the value is the else branch's
#   for every n; a counter is 1 after a loop of 0 or 100 rounds. Written without the helper, list entries are right. A
#   helper with @cute.jit is no better.
# Hurts: kernels that keep stages, phases, flags or counts as Python numbers: a refactoring that moves two lines into a
#   function changes what the kernel computes.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile nvidia-cutlass-dsl==4.8.1 numpy==2.4.6
cat > "$dir/check.py" <<'PY'
import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32
from cutlass.cute.runtime import make_ptr


class State:
    mode = 0


def set_mode(state, mode):
    state.mode = mode


@cute.jit
def set_mode_jitted(state, mode):
    state.mode = mode


def count(numbers):
    numbers[0] += 1


@cute.jit
def branches(out: cute.Pointer, n: Int32):
    results = cute.make_tensor(out, cute.make_layout(3))
    state, jitted, entry = State(), State(), [0]
    if n > 0:
        set_mode(state, 1)
        set_mode_jitted(jitted, 1)
        entry[0] = 1
    else:
        set_mode(state, 2)
        set_mode_jitted(jitted, 2)
        entry[0] = 2
    results[0], results[1], results[2] = state.mode, jitted.mode, entry[0]


@cute.jit
def loop(out: cute.Pointer, n: Int32):
    results = cute.make_tensor(out, cute.make_layout(3))
    by_helper, entry = [0], [0]
    for _ in cutlass.range(n):
        count(by_helper)
        entry[0] += 1
    results[0], results[1] = by_helper[0], entry[0]


def run(function, n):
    numbers = np.zeros(3, np.int32)
    function(make_ptr(Int32, numbers.ctypes.data, cute.AddressSpace.gmem, assumed_align=4), Int32(n))
    return numbers.tolist()


for n in (0, 100):
    helper, jitted, entry = run(branches, n)
    print(f"n={n}, after if/else: {helper} by a helper, {jitted} by a jitted helper, {entry} without")
    assert entry == (1 if n else 2)
    assert helper == jitted == 2, "the behaviour has changed"
    helper, entry, _ = run(loop, n)
    print(f"n={n}, rounds counted: {helper} by a helper, {entry} without")
    assert entry == n
    assert helper == 1, "the behaviour has changed"
PY
"$dir/venv/bin/python" "$dir/check.py"
