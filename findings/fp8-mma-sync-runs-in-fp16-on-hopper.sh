#!/bin/sh
# Question: a kernel multiplies FP8 numbers by mma.sync (m16n8k32, e4m3, fp32 sums), which PTX has from sm_89 on. Does it
#   run on the FP8 tensor cores of an H100 and of a B200, as on an RTX 4090?
# Guess: yes: one FP8 instruction everywhere, with twice the rate of bf16.
# Seen (NVRTC 13.5.37): no. For sm_89 and sm_120, it is one QMMA instruction. For sm_90a and sm_100a, it is twelve
#   conversions to fp16 and two fp16 HMMA instructions, without a message; 2:4 sparse products (mma.sp) alike. Int8 is one
#   IMMA everywhere. FP8 tensor cores are used there only by wgmma (sm_90a) and tcgen05 (sm_100a). Triton 3.9.0, too,
#   converts to fp16 for tl.dot with fewer than 64 rows or 4 warps.
# Hurts: portable FP8 kernels, and those of few rows, as in decoding and attention: on these GPUs they issue
#   the two products that bf16 has and twelve conversions more, so FP8 saves only memory.
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
extern "C" __global__ void multiply(const uint4* a, const uint4* b, SUMS* c, const int* kept) {
  const int i = threadIdx.x;
  const uint4 x = a[i], y = b[i];
  SUMS z = c[i];
#if KIND == 0
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(z.x), "+f"(z.y), "+f"(z.z), "+f"(z.w) : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y));
#elif KIND == 1
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
      : "+f"(z.x), "+f"(z.y), "+f"(z.z), "+f"(z.w)
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "r"(y.z), "r"(y.w), "r"(kept[i]));
#else
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(z.x), "+r"(z.y), "+r"(z.z), "+r"(z.w) : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y));
#endif
  c[i] = z;
}
"""
seen = {}
for kind, name in enumerate(("FP8", "FP8 2:4", "int8")):
    for architecture in ("sm_89", "sm_90a", "sm_100a", "sm_120"):
        names = instructions(CODE, architecture, f"-DKIND={kind}", "-DSUMS=" + ("int4" if name == "int8" else "float4"))
        products = [name for name in names if "MMA" in name]
        conversions = sum("UNPACK" in name for name in names)
        seen[name, architecture] = products, conversions
        print(f"{name}, {architecture}: {', '.join(products)}; {conversions} conversions to fp16")
for (name, architecture), (products, conversions) in seen.items():
    if name == "int8" or architecture in ("sm_89", "sm_120"):
        assert len(products) == 1 and not products[0].startswith("HMMA") and conversions == 0
    else:
        assert len(products) == 2 and conversions >= 12, "the behaviour has changed"
        assert all(product.startswith("HMMA") for product in products), "the behaviour has changed"
PY
"$dir/venv/bin/python" "$dir/check.py" "$dir"
