// What the two kernels that gather weight rows share: who is who in a block of threads, and the
// ring of shared-memory stages between the gathering warpgroup and the two that multiply.
#pragma once
#include "union.cuh"
#include "wgmma.cuh"

constexpr int gather_threads = 128;  // warpgroup 0; warpgroups 1 and 2 multiply
constexpr int block_threads = 384;

// Where 16 bytes, chunk `chunk` of 128-byte row `row`, lie in a tile with the 128-byte swizzle.
__device__ __forceinline__ uint32 swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ row % 8) << 4);
}

// The gathering side of a ring: stage `it` is filled while the copies of up to `lag` stages before
// it are under way; `publish` hands over those that have arrived.
template <int stages, int lag>
struct GatherRing {
  uint64 *full, *empty;
  int it = 0;

  __device__ int acquire() {
    barrier_wait(&empty[it % stages], (it / stages & 1) ^ 1);
    return it % stages;
  }
  __device__ void publish() {
    copy_commit();
    if (it >= lag) {
      copy_wait<lag>();
      fence_async_proxy();
      barrier_arrive(&full[(it - lag) % stages]);
    }
    ++it;
  }
  __device__ void flush() {
    copy_wait<0>();
    fence_async_proxy();
    for (int i = it > lag ? it - lag : 0; i < it; ++i) barrier_arrive(&full[i % stages]);
  }
};
