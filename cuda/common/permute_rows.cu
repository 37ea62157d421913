// permute_rows: to[i] = from[row_of[i]], rows of elements. What token order costs where the kernel that
// makes x is not ours and cannot write it in order.
//
// A warp copies a row, 4 KB at a time.
#include "common/element.cuh"

constexpr int threads = 256, warps = threads / 32, loads = 8;

extern "C" __global__ void __launch_bounds__(threads)
    permute_rows(const element* from, const int* row_of, int m, int k, element* to) {
  await_previous_kernel();
  const int row = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= m) return;
  const int octets = k / 8;
  const uint4* source = reinterpret_cast<const uint4*>(from + static_cast<uint64>(row_of[row]) * k);
  uint4* target = reinterpret_cast<uint4*>(to + static_cast<uint64>(row) * k);
  for (int first = lane; first < octets; first += 32 * loads) {
    uint4 octet[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i)
      if (first + 32 * i < octets) octet[i] = source[first + 32 * i];
#pragma unroll
    for (int i = 0; i < loads; ++i)
      if (first + 32 * i < octets) target[first + 32 * i] = octet[i];
  }
}

extern "C" __device__ const uint32 permute_rows_threads = threads, permute_rows_shared_bytes = 0;
