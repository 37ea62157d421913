// What the two kernels that gather weight rows share on GPUs other than Hopper: eight warps that
// copy and multiply alike, a ring of stages that cp.async fills, and work units.
//
// A block of threads makes 64 tokens × 256 sums, 32 of the inner dimension a stage; a warp holds 32
// tokens × 64 of them. Four stages are 80 KB: a block fits wherever 99 KB can be had (sm_86, 89,
// 120), and two on a multiprocessor of sm_80 and 90.
#pragma once
#include "common/mma.cuh"
#include "common/union.cuh"
#include "common/unit_taker.cuh"

constexpr int block_threads = 256, blocks_per_multiprocessor = 2;
constexpr int stages = 4, stage_inner = 32, unit_width = 256;
constexpr int mma_inner = 16;

// Sums of a warp: [16 tokens][8 columns][element of the fragment].
using Sums = float[2][8][4];

// Takes `steps` stages through the ring. `copy(stage)` starts this thread's copies of the next step
// and is called for one step after the other; `multiply(stage)` uses what lies there. Nobody may be
// reading the ring when it starts.
template <typename Copy, typename Multiply, typename ApproachEnd>
__device__ __forceinline__ void run_ring(int steps, Copy copy, Multiply multiply,
                                         ApproachEnd approach_end) {
#pragma unroll
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) copy(step);
    copy_commit();
  }
  // Whoever multiplies takes the units too: asked in between, not at every step.
  constexpr int part = UnitTaker::look_up_at;
  static_assert(UnitTaker::take_at == 2 * part);
  int step = 0;
#pragma unroll 1
  for (int left = 2 * part; left >= 0; left -= part) {
#pragma unroll 1
    for (; step < steps - left; ++step) {
      copy_wait<stages - 2>();
      // Everybody's copies of this step are here, and the stage of the step before is free.
      __syncthreads();
      if (step + stages - 1 < steps) copy((step + stages - 1) % stages);
      copy_commit();  // empty at the end, to keep the count
      multiply(step % stages);
    }
    approach_end(left);
  }
}

// A walk through the work units, for all threads together.
struct UnitWalk : UnitTaker {
  WorkUnit (&shared)[2];  // in turn: a slow thread may still read the one before
  int turn = 0;

  __device__ UnitWalk(WorkUnit (&handed)[2], uint32* next_index, int units)
      : UnitTaker(next_index, units), shared(handed) {}
  // All threads have finished the unit before.
  template <typename LookUp>
  __device__ WorkUnit next(LookUp look_up) {
    if (threadIdx.x == 0) shared[turn] = take(look_up);
    __syncthreads();
    const WorkUnit unit = shared[turn];
    turn ^= 1;
    return unit;
  }
};
