#!/bin/sh
# Question: a block copies a tile of floats into shared memory with cooperative_groups::memcpy_async(block, shared, global,
#   bytes), or with cuda::memcpy_async and a barrier. How many bytes does one instruction copy?
# Guess: 16, as cp.async can, or the bulk copy of Hopper, if the tile is aligned; the library finds out.
# Seen (NVRTC 13.5.37 with its headers; sm_80, sm_90a, sm_100a): 4. The type of the pointer decides at compile time, so
#   each element of a float array has a copy of its own, four times as many as necessary. For half and int8 pointers,
#   cooperative groups look at the addresses at run time, and copy 16 bytes at a time if they can: the narrower type is
#   copied by wider instructions. float4 pointers, or cuda::aligned_size_t<16>, give 16 bytes, and with the latter
#   cuda::memcpy_async is a bulk copy on Hopper and Blackwell.
# Hurts: kernels that load fp32 or int32 tiles (accumulators, indices, scales) by these functions, as NVIDIA's examples do:
#   the loads take four times as many instructions and slots of the memory pipeline.
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
INCLUDES = [f"-I{NVIDIA}/include", f"-I{NVIDIA}/include/cccl", "-std=c++17"]


def copies(source, architecture):
    """The widths in bytes of the asynchronous copies in the machine code; "bulk" for a bulk copy."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [option.encode() for option in (f"-arch={architecture}", *INCLUDES)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, (architecture, result)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    binary = bytes(size)
    nvrtc.nvrtcGetCUBIN(program, binary)
    path = pathlib.Path(sys.argv[1], "kernel.cubin")
    path.write_bytes(binary)
    listing = subprocess.run([NVIDIA / "bin/nvdisasm", "-c", path], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"(LDGSTS(?!BAR)\S*|UBLKCP\S*)", listing)
    width = {"UBLKCP": lambda name: "bulk", "LDGSTS": lambda name: 16 if "128" in name else 8 if "64" in name else 4}
    return sorted({width[name[:6]](name) for name in found}, key=str)


GROUPS = """
#include <cuda_fp16.h>
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void load(const TYPE* x, TYPE* out, int n) {
  extern __shared__ __align__(128) char memory[];
  TYPE* tile = reinterpret_cast<TYPE*>(memory);
  auto block = cooperative_groups::this_thread_block();
  cooperative_groups::memcpy_async(block, tile, x, sizeof(TYPE) * n);
  cooperative_groups::wait(block);
  out[threadIdx.x] = tile[threadIdx.x + 1];
}"""
BARRIER = """
#include <cooperative_groups.h>
#include <cuda/barrier>
extern "C" __global__ void load(const float* x, float* out, int n) {
  extern __shared__ __align__(128) float tile[];
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  if (threadIdx.x == 0) init(&barrier, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(cooperative_groups::this_thread_block(), tile, x, SIZE(sizeof(float) * n), barrier);
  barrier.arrive_and_wait();
  out[threadIdx.x] = tile[threadIdx.x + 1];
}"""
CASES = {f"cooperative groups, {t}": GROUPS.replace("TYPE", t) for t in ("float", "float4", "__half", "signed char")}
CASES["barrier, float"] = BARRIER.replace("SIZE", "")
CASES["barrier, float, aligned_size_t<16>"] = BARRIER.replace("SIZE", "cuda::aligned_size_t<16>")
for architecture in ("sm_80", "sm_90a", "sm_100a"):
    for name, source in CASES.items():
        widths = copies(source, architecture)
        print(f"{architecture}, {name}: {widths}")
        if name.endswith(", float"):
            assert widths == [4], "the behaviour has changed"
        elif "aligned" in name:
            assert widths == ([16] if architecture == "sm_80" else ["bulk"])
        else:
            assert 16 in widths
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
