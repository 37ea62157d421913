#!/bin/sh
# Question: PTX has atom.add and red.add for f16 (from sm_70 on) and bf16 (from sm_90 on), and CUDA has atomicAdd for
#   __half and __nv_bfloat16. Is adding one such number in global memory one instruction?
# Guess: yes, as for float, with half of the bytes.
# Seen (NVRTC 13.5.37; sm_80, sm_90a, sm_100a, sm_120): no. Even PTX's own red.global.add.noftz.f16 and .bf16 become a loop
#   of load, add and compare-and-swap over the 32 bits that hold the number and its neighbour. Only pairs (f16x2, bf16x2)
#   have an instruction. On sm_80, CUDA's atomicAdd of bf16 pairs is a loop as well.
# Hurts: gradients of embeddings, scattered columns and split products that are added in bf16 or fp16 one number at a
#   time: threads that add to neighbouring columns make each other repeat the loop. fp32, with twice the bytes, has none.
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
extern "C" __global__ void add(const TYPE* x, TYPE* out, const int* at) {
  asm volatile("red.global.add" KIND " [%0], %1;" :: "l"(out + at[threadIdx.x]), REGISTER(x[threadIdx.x]) : "memory");
}
"""
KINDS = {
    "f32": ("float", ".f32", '"f"'),
    "f16": ("unsigned short", ".noftz.f16", '"h"'),
    "bf16": ("unsigned short", ".noftz.bf16", '"h"'),
    "f16x2": ("unsigned", ".noftz.f16x2", '"r"'),
    "bf16x2": ("unsigned", ".noftz.bf16x2", '"r"'),
}
for architecture in ("sm_80", "sm_90a", "sm_100a", "sm_120"):
    for name, (kind, suffix, register) in KINDS.items():
        if architecture == "sm_80" and "bf16" in name:
            continue  # PTX has these from sm_90 on
        names = instructions(CODE, architecture, f"-DTYPE={kind}", f'-DKIND="{suffix}"', f"-DREGISTER={register}")
        adds = [name for name in names if name.startswith(("RED", "ATOM"))]
        print(f"{architecture}, {name}: {', '.join(adds)}, {len(names)} instructions")
        loop = any("CAS" in name for name in adds)
        assert loop == (name in ("f16", "bf16")), "the behaviour has changed"

PAIRS = """
#include <cuda_bf16.h>
extern "C" __global__ void add(const __nv_bfloat162* x, __nv_bfloat162* out) { atomicAdd(out, x[threadIdx.x]); }
"""
assert any("CAS" in name for name in instructions(PAIRS, "sm_80")), "pairs on sm_80 have changed"
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
