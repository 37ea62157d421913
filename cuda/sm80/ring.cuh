// Shared by the kernels that gather weight rows on GPUs without wgmma: eight warps, each of which copies
// and multiplies, a ring of stages filled by cp.async, and work units.
//
// A block of threads computes 64 × 256 sums, 32 of the inner dimension per stage; a warp holds 32 × 64 of
// them. A stage is 20 KB, and a ring as deep as shared memory has room for: two blocks of threads with
// four stages on a multiprocessor of sm_80, with five on those of sm_90 and sm_100, and one of four
// where there are only 99 KB (sm_86, 89, 120).
#pragma once
#include "common/mma.cuh"
#include "common/union.cuh"
#include "common/tile_scheduler.cuh"

using namespace ring_tiles;
constexpr int stage_bytes = stage_inner * (block_tokens + unit_columns) * 2;
constexpr int mma_inner = 16;
static_assert(stage_inner % mma_inner == 0);
static_assert(block_tokens / warp_rows * (unit_columns / warp_columns) * 32 == block_threads,
              "the warps' sums are all of a unit");

// SPARSELLM_SHARED_KIB: the shared memory that a block of threads can have; CUDA reserves one KiB more
// for each block. Half a KiB is kept for everything that is not the ring.
constexpr int shared_capacity = SPARSELLM_SHARED_KIB * 1024, outside_ring = 512, reserved_by_cuda = 1024;
constexpr int ring_bytes_of_two = (shared_capacity - reserved_by_cuda) / 2 - outside_ring;
constexpr int blocks_per_multiprocessor = ring_bytes_of_two >= min_stages * stage_bytes ? 2 : 1;
constexpr int ring_capacity =
    blocks_per_multiprocessor == 2 ? ring_bytes_of_two : shared_capacity - outside_ring;
constexpr int stages =
    ring_capacity / stage_bytes < max_stages ? ring_capacity / stage_bytes : max_stages;
static_assert(stages >= min_stages, "the ring needs 80 KiB of shared memory");

// Sums of a warp: [16 rows][8 columns][element of the fragment].
using Sums = float[2][8][4];
static_assert(sizeof(Sums) / sizeof(float) * 32 == warp_rows * warp_columns);

// What a kernel's `Shared` must keep to, for as many blocks as the launch bounds say.
template <typename Shared>
constexpr bool fits = sizeof(Shared) <= (blocks_per_multiprocessor == 2
                                             ? (shared_capacity - reserved_by_cuda) / 2
                                             : shared_capacity);

// Runs `steps` stages through the ring. `copy(stage)` starts this thread's copies of the next step and is
// called for each step in turn; `multiply(stage)` uses what the stage holds. No thread may still be
// reading the ring when it starts.
template <typename Copy, typename Multiply, typename PrefetchNext>
__device__ __forceinline__ void run_ring(int steps, Copy copy, Multiply multiply,
                                         PrefetchNext prefetch_next) {
#pragma unroll
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) copy(step);
    copy_commit();
  }
  // The warps that multiply also schedule the units: every few steps, not at each of them.
  constexpr int part = TileScheduler::look_up_at;
  static_assert(TileScheduler::claim_at == 2 * part);
  int step = 0, stage = 0;
#pragma unroll 1
  for (int left = 2 * part; left >= 0; left -= part) {
#pragma unroll 1
    for (; step < steps - left; ++step) {
      copy_wait<stages - 2>();
      // All threads' copies of this step have arrived, and the stage of the step before is free.
      __syncthreads();
      if (step + stages - 1 < steps) copy(stage == 0 ? stages - 1 : stage - 1);
      copy_commit();  // empty at the end, to keep the count
      multiply(stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    prefetch_next(left);
  }
}

// Iterates over the work units, for all threads together.
struct UnitIterator : TileScheduler {
  WorkUnit (&shared)[2];  // alternating: a slow thread may still read the previous one
  int turn = 0;

  __device__ UnitIterator(WorkUnit (&handed)[2], uint32* next_index, int units)
      : TileScheduler{next_index, units}, shared(handed) {}
  // All threads have finished the unit before.
  template <typename LookUp>
  __device__ WorkUnit next(LookUp look_up) {
    if (threadIdx.x == 0) shared[turn] = fetch(look_up);
    __syncthreads();
    const WorkUnit unit = shared[turn];
    turn ^= 1;
    return unit;
  }
};
