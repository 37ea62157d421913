// Shared by the kernels that gather weight rows: the roles of the warpgroups of a block, and the ring of
// shared-memory stages between the producer warpgroup, which gathers, and the two consumer warpgroups,
// which multiply.
#pragma once
#include "common/union.cuh"
#include "common/tile_scheduler.cuh"
#include "sm90/hopper.cuh"
#include "sm90/wgmma.cuh"

constexpr int block_threads = producer_threads + consumer_threads, blocks_per_multiprocessor = 1;

// The current stage of a ring, and the parity of its barriers in this round.
template <int stages>
struct PipelineState {
  static_assert(stages >= 2, "one is filled while the one before is read");
  int stage = 0;
  uint32 parity = 0;

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ int previous() const { return stage == 0 ? stages - 1 : stage - 1; }
};

// The producer hands a stage over with `copy_arrive`, which does not wait: each copy arrives at the
// stage's barrier when it is done. The consumers call `fence_async_proxy` after their wait; in the
// producer that fence would wait for all outstanding copies (H200, union_up at 16384 × 2048 × 5632, 648
// entries per block: 0.21 instead of 0.18 ms).

// The queue through which thread 0 hands work units to all threads.
struct UnitQueue {
  static constexpr int depth = 4;
  static_assert((depth & (depth - 1)) == 0, "of the parity of a place");
  WorkUnit unit[depth];
  uint64 full[depth], empty[depth];

  // Called by one thread, before the block's first barrier.
  __device__ void init() {
    for (int i = 0; i < depth; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], block_threads - 1);
    }
  }
};

// A thread's reading position in the queue.
struct UnitReader {
  UnitQueue& queue;
  int it = 0;

  __device__ int place() const { return it % UnitQueue::depth; }
  __device__ int parity() const { return it / UnitQueue::depth & 1; }
  __device__ WorkUnit next() {
    mbarrier_wait(&queue.full[place()], parity());
    const WorkUnit unit = queue.unit[place()];
    mbarrier_arrive(&queue.empty[place()]);
    ++it;
    return unit;
  }
};

// The work units as a producer thread sees them: thread 0 schedules them, the others read the queue.
struct UnitIterator : UnitReader, TileScheduler {
  template <typename LookUp>
  __device__ WorkUnit next(LookUp look_up) {
    if (threadIdx.x != 0) return UnitReader::next();
    const WorkUnit unit = fetch(look_up);
    mbarrier_wait(&queue.empty[place()], parity() ^ 1);
    queue.unit[place()] = unit;
    mbarrier_arrive(&queue.full[place()]);
    ++it;
    return unit;
  }
};

// The prologue of a kernel of `block_threads` threads: returns its shared memory with barriers
// initialised.
//
// full_arrivals: arrivals after which a stage is full. It is empty when both consumer warpgroups have
// read it.
template <typename Shared>
__device__ __forceinline__ Shared& begin(int full_arrivals) {
  Shared& shared = swizzled_shared<Shared>();
  if (threadIdx.x == 0) {
    constexpr int stages = sizeof(Shared::full) / sizeof(uint64);
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(&shared.full[stage], full_arrivals);
      mbarrier_init(&shared.empty[stage], num_consumers);
    }
    shared.queue.init();
    mbarrier_init_fence();
  }
  __syncthreads();
  admit_next_kernel();
  await_previous_kernel();
  return shared;
}
