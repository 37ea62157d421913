// A dynamic tile scheduler: work units differ in size, so the first idle block of threads takes the next
// one from a counter in global memory.
#pragma once
#include "common/ptx.cuh"

struct WorkUnit {
  int index;  // -1: there are no more
  uint32 a, b;  // its entry in the list of units
};

// Used by thread 0 of a block of threads. The next unit is claimed while the last stages of the current
// one are being filled, which hides the latency of global memory between units. It is not claimed
// earlier: a claimed unit would wait while other blocks have run out of work (H200, weight_grad on
// layer 1 of the pilot's traces, claiming two units ahead: the first multiprocessor was idle after 0.21
// of 0.32 ms).
struct TileScheduler {
  static constexpr int claim_at = 8, look_up_at = 4, never = -1;  // stages left
  uint32* counter;
  int num_units, due = threadIdx.x == 0 ? claim_at : never, index = 0;
  WorkUnit ahead{-1, 0, 0};

  // Called before each stage with the number of stages that are left in the unit. `look_up(index)` reads
  // a unit's entry in the list. Threads other than 0 may call it; for them it does nothing.
  template <typename LookUp>
  __device__ __forceinline__ void prefetch_next(int left, LookUp look_up) {
    if (left > due) return;
    if (due == claim_at) {
      index = claim_next(counter);
      due = look_up_at;
    } else {
      const uint2 item = index < num_units ? look_up(index) : make_uint2(0, 0);
      ahead = {index < num_units ? index : -1, item.x, item.y};
      due = never;
    }
  }
  // The next unit, once the current one is finished.
  template <typename LookUp>
  __device__ __forceinline__ WorkUnit fetch(LookUp look_up) {
    while (due != never) prefetch_next(0, look_up);
    if (ahead.index >= 0) due = claim_at;
    return ahead;
  }
};
