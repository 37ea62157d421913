// Sums over a block of threads, called by all of them. `place` is shared memory used for nothing else.
#pragma once
#include "common/ptx.cuh"

// The sum over the warps or threads before this one, and over all of them.
struct Sums {
  uint32 before, total;
};

template <int warps>
__device__ __forceinline__ Sums sum_warps(uint32 (&place)[warps], uint32 of_warp) {
  static_assert(warps <= 32, "a lane adds up what each warp has");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // all have read what is overwritten next
  if (lane == 0) place[warp] = of_warp;
  __syncthreads();
  const uint32 other = lane < warps ? place[lane] : 0;
  return {__reduce_add_sync(~0u, lane < warp ? other : 0), __reduce_add_sync(~0u, other)};
}

template <int warps>
__device__ __forceinline__ Sums sum_threads(uint32 (&place)[warps], uint32 own) {
  const uint32 sum = sum_to_lane(own);
  const Sums of_warps = sum_warps(place, __shfl_sync(~0u, sum, 31));
  return {of_warps.before + sum - own, of_warps.total};
}
