#!/bin/sh
# Question: FP8 weights or activations are converted by CUDA's cuda_fp8.h on GPUs without FP8 instructions (A100, RTX 30).
#   What does a conversion from float to e4m3 cost?
# Guess: a dozen or two integer instructions: shift, round, clamp. The header says nothing about it.
# Seen (NVRTC 13.5.37, sm_80 and sm_86): each number is converted to double first, and its 64 bits are then taken apart:
#   about 60 instructions with branches a number. The conversion to double (F2F.F64.F32) runs at the rate of fp64, which on
#   an RTX 30 is 1/64 of fp32's. From sm_89 on, it is one instruction for two numbers.
# Hurts: FP8 caches, checkpoints and weight-only quantisation on older GPUs: a kernel of one load, one conversion
#   and one store is expected to be bound by memory, and has 60 instructions a number between them. (Only the
#   instructions were counted; nothing was timed.) Integer operations on the 32 bits need no fp64.
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
#include <cuda_fp8.h>
extern "C" __global__ void quantise(const float4* x, __nv_fp8x4_e4m3* out) {
#ifdef COPY
  reinterpret_cast<float*>(out)[threadIdx.x] = x[threadIdx.x].x;
#else
  out[threadIdx.x] = __nv_fp8x4_e4m3(x[threadIdx.x]);
#endif
}
"""
for architecture in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"):
    names = [name for name in instructions(CODE, architecture) if name != "NOP"]
    rest = [name for name in instructions(CODE, architecture, "-DCOPY") if name != "NOP"]
    doubles = sum(name.startswith("F2F.F64.F32") for name in names)
    more = len(names) - len(rest)
    print(f"{architecture}: {more} instructions more than a copy for four numbers, {doubles} conversions to fp64")
    if architecture in ("sm_80", "sm_86"):
        assert more > 200 and doubles == 4, "the behaviour has changed"
    else:
        assert more < 10 and doubles == 0
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
