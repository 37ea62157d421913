// Work units, taken from a counter in global memory as they are needed: units differ in size, so who
// is free takes the next.
#pragma once
#include "common/ptx.cuh"

struct WorkUnit {
  int index;  // -1: there are no more
  uint32 a, b;  // what the list says of it
};

// For thread 0 of a block of threads. A unit is taken while the last stages of the one before are
// filled, so that nobody waits for global memory between units, and not earlier, for it would wait
// while others have none left (H200, weight_grad on layer 1 of the pilot's traces, two units ahead:
// the first multiprocessor was done after 0.21 ms of 0.32).
struct UnitTaker {
  static constexpr int take_at = 8, look_up_at = 4, never = -1;  // stages left
  uint32* counter;
  int num_units, due, index = 0;
  WorkUnit ahead{-1, 0, 0};

  __device__ UnitTaker(uint32* next_index, int units)
      : counter(next_index), num_units(units), due(threadIdx.x == 0 ? take_at : never) {}

  // Before each stage: how many the unit has from it on. `look_up(index)`: what the list says of a
  // unit. Other threads than 0 may call it too.
  template <typename LookUp>
  __device__ __forceinline__ void approach_end(int left, LookUp look_up) {
    if (left > due) return;
    if (due == take_at) {
      index = take_next(counter);
      due = look_up_at;
    } else {
      const uint2 item = index < num_units ? look_up(index) : make_uint2(0, 0);
      ahead = {index < num_units ? index : -1, item.x, item.y};
      due = never;
    }
  }
  template <typename LookUp>
  __device__ __forceinline__ WorkUnit take(LookUp look_up) {
    while (due != never) approach_end(0, look_up);
    if (ahead.index >= 0) due = take_at;
    return ahead;
  }
};
