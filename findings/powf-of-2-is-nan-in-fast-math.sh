#!/bin/sh
# Question: a kernel squares a number by powf(x, 2.0f), as x.pow(2) in torch, and is compiled with and without
#   --use_fast_math. Is it a multiplication?
# Guess: yes in both cases, as optimising compilers for CPUs make it.
# Seen (NVRTC 13.5.37, sm_90a): in neither. Without fast math, it is a general power of about 75 instructions (x * x adds
#   one). With --use_fast_math, it is exp2(2 log2(x)), so the square of every negative number is NaN: the instructions are
#   MUFU.LG2, an addition, MUFU.EX2, and nothing looks at the sign. powf(x, 0.5f) and powf(x, 3.0f) are alike.
# Hurts: RMSNorm, variances, ReLU² and polynomial approximations (tanh's GELU has x³): NaN from the first negative number on
#   with one option of the compiler, and a kernel that is bound by arithmetic without it. Write x * x.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile cuda-bindings==13.5.0 nvidia-cuda-nvrtc==13.5.37 \
  nvidia-cuda-nvdisasm==13.5.37
cat > "$dir/check.py" <<'PY'
import pathlib
import re
import subprocess
import sys

from cuda.bindings import nvrtc

NVIDIA = next(pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/cu13"))


def instructions(source, architecture, *options):
    """The machine code that NVRTC makes of `source`, as names of instructions."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [f"-arch={architecture}", *options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, (architecture, result)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    binary = bytes(size)
    nvrtc.nvrtcGetCUBIN(program, binary)
    path = pathlib.Path(sys.argv[1], "kernel.cubin")
    path.write_bytes(binary)
    listing = subprocess.run([NVIDIA / "bin/nvdisasm", "-c", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(\S+)[^;]*;", listing, re.M)


CODE = """
extern "C" __global__ void compute(const float* x, float* out) { out[threadIdx.x] = EXPRESSION(x[threadIdx.x]); }
"""
DEFINITIONS = {
    "x": "-DEXPRESSION(x)=x",
    "x * x": "-DEXPRESSION(x)=x*x",
    "powf(x, 2)": "-DEXPRESSION(x)=powf(x,2.0f)",
    "powf(x, 3)": "-DEXPRESSION(x)=powf(x,3.0f)",
    "powf(x, 0.5)": "-DEXPRESSION(x)=powf(x,0.5f)",
}
seen = {}
for options in ((), ("--use_fast_math",)):
    for name, definition in DEFINITIONS.items():
        names = [name for name in instructions(CODE, "sm_90a", definition, *options) if name != "NOP"]
        seen[name, options] = names
        special = [name for name in names if name.startswith(("MUFU", "FMUL", "FADD", "FSETP", "FSEL", "LOP3"))]
        fast = f": {', '.join(special)}" if options else ""
        print(f"{name} {' '.join(options)}: {len(names) - len(seen['x', options])} instructions more than a copy{fast}")
for name in ("powf(x, 2)", "powf(x, 3)", "powf(x, 0.5)"):
    assert len(seen[name, ()]) - len(seen["x", ()]) > 50, "the behaviour has changed"
    names = seen[name, ("--use_fast_math",)]
    assert [kind for kind in names if kind.startswith("MUFU")] == ["MUFU.LG2", "MUFU.EX2"], "the behaviour has changed"
    assert not any(kind.startswith(("FSETP", "FSEL", "LOP3")) for kind in names), "the behaviour has changed"
assert len(seen["x * x", ()]) - len(seen["x", ()]) == 1
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
