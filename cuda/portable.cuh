// What the two kernels that gather weight rows share on GPUs other than Hopper: eight warps that
// copy and multiply alike, a ring of stages that cp.async fills, and work units.
//
// A block of threads makes 64 tokens × 256 sums, 32 of the inner dimension a stage; a warp holds 32
// tokens × 64 of them. Four stages are 80 KB: a block fits wherever 99 KB can be had (sm_86, 89,
// 120), and two on a multiprocessor of sm_80 and 90.
#pragma once
#include "mma.cuh"
#include "union.cuh"

constexpr int block_threads = 256, blocks_per_multiprocessor = 2;
constexpr int stages = 4, stage_inner = 32, unit_width = 256;
constexpr int mma_inner = 16;

// Sums of a warp: [16 tokens][8 columns][element of the fragment].
using Sums = float[2][8][4];

// Takes `steps` stages through the ring. `copy(stage)` starts this thread's copies of the next step
// and is called for one step after the other; `multiply(stage)` uses what lies there. Nobody may be
// reading the ring when it starts.
template <typename Copy, typename Multiply>
__device__ __forceinline__ void run_ring(int steps, Copy copy, Multiply multiply) {
#pragma unroll
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) copy(step);
    copy_commit();
  }
  for (int step = 0; step < steps; ++step) {
    copy_wait<stages - 2>();
    // Everybody's copies of this step are here, and the stage of the step before is free.
    __syncthreads();
    if (step + stages - 1 < steps) copy((step + stages - 1) % stages);
    copy_commit();  // empty at the end, to keep the count
    multiply(step % stages);
  }
}

// Work units, taken from a counter in global memory as they are needed: units differ in size, so
// who is free takes the next. `look_up(index)` is called by thread 0 alone, which runs a unit ahead
// with it, and two with the counter, so that nobody waits for global memory between units.
struct Unit {
  int index;  // -1: there are no more
  uint32 a, b;  // what the list says of it
};

struct UnitWalk {
  Unit (&shared)[2];  // in turn: a slow thread may still read the one before
  uint32* counter;
  int num_units, turn = 0, second = 0;
  Unit first{-1, 0, 0};

  template <typename LookUp>
  __device__ UnitWalk(Unit (&handed)[2], uint32* next, int units, LookUp look_up)
      : shared(handed), counter(next), num_units(units) {
    if (threadIdx.x == 0) {
      first = fetch(atomicAdd(counter, 1), look_up);
      second = atomicAdd(counter, 1);
    }
  }
  template <typename LookUp>
  __device__ Unit fetch(int index, LookUp look_up) {
    if (index >= num_units) return {-1, 0, 0};
    const uint2 item = look_up(index);
    return {index, item.x, item.y};
  }
  // For all threads together; all of them have finished the unit before.
  template <typename LookUp>
  __device__ Unit next(LookUp look_up) {
    if (threadIdx.x == 0) {
      shared[turn] = first;
      if (first.index >= 0) {
        first = fetch(second, look_up);
        second = atomicAdd(counter, 1);
      }
    }
    __syncthreads();
    const Unit unit = shared[turn];
    turn ^= 1;
    return unit;
  }
};
