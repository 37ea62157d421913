// What the kernels that gather weight rows share on GPUs that have no wgmma: eight warps that copy and
// multiply alike, a ring of stages that cp.async fills, and work units.
//
// A block of threads makes 64 × 256 sums, 32 of the inner dimension a stage; a warp holds 32 × 64 of
// them. A stage is 20 KB, and a ring as deep as shared memory has room for: two blocks of threads with
// four stages on a multiprocessor of sm_80, with five on those of sm_90 and sm_100, and one of four
// where there are only 99 KB (sm_86, 89, 120).
#pragma once
#include "common/mma.cuh"
#include "common/union.cuh"
#include "common/unit_taker.cuh"

constexpr int block_threads = 256;
constexpr int stage_inner = 32, unit_width = 256, stage_bytes = stage_inner * (block_tokens + unit_width) * 2;
constexpr int mma_inner = 16;

// SPARSELLM_SHARED_KIB: what a block of threads can have of a multiprocessor's shared memory, all but a
// KiB that every block takes beside its own. Half a KiB is for what is not the ring.
constexpr int shared_room = SPARSELLM_SHARED_KIB * 1024, beside_ring = 512, taken_by_cuda = 1024;
constexpr int ring_bytes_of_two = (shared_room - taken_by_cuda) / 2 - beside_ring;
constexpr int fewest_stages = 4, most_stages = 6;
constexpr int blocks_per_multiprocessor = ring_bytes_of_two >= fewest_stages * stage_bytes ? 2 : 1;
constexpr int room_for_ring =
    blocks_per_multiprocessor == 2 ? ring_bytes_of_two : shared_room - beside_ring;
constexpr int stages =
    room_for_ring / stage_bytes < most_stages ? room_for_ring / stage_bytes : most_stages;
static_assert(stages >= fewest_stages, "the ring needs 80 KiB of shared memory");

// Sums of a warp: [16 rows][8 columns][element of the fragment].
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
  int step = 0, stage = 0;
#pragma unroll 1
  for (int left = 2 * part; left >= 0; left -= part) {
#pragma unroll 1
    for (; step < steps - left; ++step) {
      copy_wait<stages - 2>();
      // Everybody's copies of this step are here, and the stage of the step before is free.
      __syncthreads();
      if (step + stages - 1 < steps) copy(stage == 0 ? stages - 1 : stage - 1);
      copy_commit();  // empty at the end, to keep the count
      multiply(stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
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
