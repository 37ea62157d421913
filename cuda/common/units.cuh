// Shares out the work on token blocks of different sizes (union.cuh: `unit` and `order`).
#pragma once
#include "common/union.cuh"

// Sizes to an eighth of a power of two, the largest (65536) first. Work units are taken in this order:
// whatever is begun last, everybody waits for.
constexpr int size_classes = 130;
__device__ __forceinline__ int class_of(uint32 members) {
  const uint32 exponent_and_eighths = __float_as_uint(static_cast<float>(members)) >> 20;
  return members == 0 ? size_classes - 1 : 1144 - exponent_and_eighths;
}

struct SharedUnits {
  uint32 blocks[size_classes], units[size_classes];  // how many, then where the next of a class goes
};

// One block of more than `size_classes` threads. Within a class the order differs from run to run.
template <int threads, typename TotalOf>
__device__ void share_units(SharedUnits& shared, int blocks, TotalOf total_of, uint2* unit,
                            uint2* order, uint32* control) {
  static_assert(threads > size_classes);
  if (threadIdx.x < size_classes) shared.blocks[threadIdx.x] = shared.units[threadIdx.x] = 0;
  __syncthreads();
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = total_of(block), whole = members / unit_members;
    const uint32 rest = members % unit_members;
    atomicAdd(shared.blocks + class_of(members), 1);
    if (whole > 0) atomicAdd(shared.units + class_of(unit_members), whole);
    if (rest > 0) atomicAdd(shared.units + class_of(rest), 1);
  }
  __syncthreads();
  uint32 blocks_before = 0, units_before = 0;
  if (threadIdx.x <= size_classes) {
    for (int larger = 0; larger < threadIdx.x; ++larger) {
      blocks_before += shared.blocks[larger];
      units_before += shared.units[larger];
    }
  }
  if (threadIdx.x == size_classes) control[num_units] = units_before;
  __syncthreads();
  if (threadIdx.x < size_classes) {
    shared.blocks[threadIdx.x] = blocks_before;
    shared.units[threadIdx.x] = units_before;
  }
  __syncthreads();
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = total_of(block), whole = members / unit_members;
    order[atomicAdd(shared.blocks + class_of(members), 1)] = make_uint2(block, members);
    const auto place = [&](uint32 at, uint32 chunk) {
      unit[at] = make_uint2(block << 16 | chunk, members - chunk * unit_members);
    };
    if (whole > 0) {
      const uint32 at = atomicAdd(shared.units + class_of(unit_members), whole);
      for (uint32 chunk = 0; chunk < whole; ++chunk) place(at + chunk, chunk);
    }
    if (members % unit_members > 0)
      place(atomicAdd(shared.units + class_of(members % unit_members), 1), whole);
  }
}
