#!/bin/sh
# Question: a kernel computes a * b + c with __nv_bfloat16, and is compiled for the A100 and for the H100, with the same
#   options. Are the results the same?
# Guess: yes. Multiplication and addition are fused on both, as for float and __half, unless -fmad=false says otherwise.
# Seen (NVRTC 13.5.37): no. For sm_90a, sm_100a and sm_120, there is one fused multiply-add, which rounds once. For sm_80,
#   sm_86 and sm_89 there are two instructions: the product is rounded to bf16 first. The operators of cuda_bf16.h use
#   PTX's mul.bf16 and add.bf16 only from sm_90 on. float and __half are fused for all of them.
#   -fmad=false makes all of them round twice; __hfma rounds once.
# Hurts: tests of kernels against recorded numbers, and comparisons of runs on two kinds of GPUs: where a * b and c nearly
#   cancel, the result on the A100 can be zero while that on the H100 is not. It costs Ampere a second instruction, too.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile cuda-bindings==13.5.0 nvidia-cuda-nvrtc==13.5.37 \
  nvidia-cuda-nvdisasm==13.5.37 nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-cuda-cccl==13.3.5.0.6
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
    options = [f"-arch={architecture}", f"-I{NVIDIA}/include", f"-I{NVIDIA}/include/cccl", *options]
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
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void compute(const TYPE* a, const TYPE* b, TYPE* c) {
  const int i = threadIdx.x;
  c[i] = a[i] * b[i] + c[i];
}
"""


def arithmetic(kind, architecture, *options):
    """The arithmetic of a * b + c, without that of a mere copy (which makes constants)."""
    empty = CODE.replace("a[i] * b[i] + c[i]", "a[i]")
    names, rest = (instructions(code, architecture, f"-DTYPE={kind}", *options) for code in (CODE, empty))
    kept = [name for name in names if name.startswith(("HFMA", "HMUL", "HADD", "FFMA", "FMUL", "FADD"))]
    for name in rest:
        if name in kept:
            kept.remove(name)
    return kept


for kind in ("float", "__half", "__nv_bfloat16"):
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"):
        fused, separate = arithmetic(kind, architecture), arithmetic(kind, architecture, "-fmad=false")
        print(f"{kind}, {architecture}: {', '.join(fused)}; with -fmad=false {', '.join(separate)}")
        twice = kind == "__nv_bfloat16" and architecture in ("sm_80", "sm_86", "sm_89")
        assert len(fused) == 1 + twice, "the behaviour has changed"
        assert len(separate) == 2
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
