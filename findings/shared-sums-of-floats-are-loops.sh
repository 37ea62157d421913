#!/bin/sh
# Question: threads add floats, or integers of 64 bits, to sums in shared memory by atomicAdd. Is that one instruction
#   of an H100 or a B200, as in global memory?
# Guess: yes. Shared memory is the faster place for atomics, so partial sums of a block belong there.
# Seen (NVRTC 13.5.37; sm_80, sm_90a, sm_100a, sm_120): no. For float, double, __half2, __nv_bfloat162 and integers of 64
#   bits, it is a loop of load, add and compare-and-swap (ATOMS.CAST.SPIN), which each thread repeats until no other was
#   in between. Only integers of 32 bits have ATOMS.ADD. In global memory, float, double and both integers are one RED
#   instruction, sent and forgotten.
# Hurts: histograms with weights, column sums, router statistics and reductions over a block: where many threads add to one
#   sum, the last of them has to wait for all others. Atomics are not cheaper for being moved to shared memory. Reduce by
#   shuffles, add integers of 32 bits, or give each warp sums of its own.
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
using uint64 = unsigned long long;
extern "C" __global__ void add(const TYPE* x, TYPE* out, const int* at) {
#ifdef SHARED
  __shared__ TYPE sum[256];
  sum[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  atomicAdd(sum + (at[threadIdx.x] & 255), x[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = sum[threadIdx.x];
#else
  atomicAdd(out + at[threadIdx.x], x[threadIdx.x]);
#endif
}
"""
for architecture in ("sm_80", "sm_90a", "sm_100a", "sm_120"):
    for kind in ("int", "uint64", "float", "double", "__half2", "__nv_bfloat162"):
        names = instructions(CODE, architecture, f"-DTYPE={kind}", "-DSHARED")
        shared = {name for name in names if name.startswith("ATOMS")}
        everywhere = instructions(CODE, architecture, f"-DTYPE={kind}")
        one = any(name.startswith("RED") for name in everywhere) and not any("CAS" in name for name in everywhere)
        print(f"{architecture}, {kind}: shared {', '.join(shared)}; global {'one RED instruction' if one else 'more'}")
        assert shared and (kind == "int") == (shared == {"ATOMS.ADD"}), "the behaviour has changed"
        assert kind == "int" or all("CAS" in name for name in shared), "the behaviour has changed"
        assert one == (kind in ("int", "uint64", "float", "double")), "global atomics have changed"
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
