// Schedules the work on token blocks of different sizes (union.cuh: `unit`, `order` and `split`).
#pragma once
#include "common/union.cuh"

// Sizes to an eighth of a power of two, the largest (65536) first. Work units are scheduled in this
// order: the kernel ends when the last unit does, so the last ones must be small.
// Three bits behind the exponent of a float say which eighth: 1016 of 1, and 1144 of the largest.
constexpr int size_classes = 130;
static_assert(max_neurons == 1 << 16 && 1144 == (127 + 16) << 3, "the largest size has class 0");
static_assert(size_classes == 1144 - (127 << 3) + 2, "the last class is for nothing at all");
__device__ __forceinline__ int class_of(uint32 members) {
  const uint32 exponent_and_eighths = __float_as_uint(static_cast<float>(members)) >> 20;
  return members == 0 ? size_classes - 1 : 1144 - exponent_and_eighths;
}
// The size that no member of a class reaches.
__device__ __forceinline__ float class_end(int size_class) {
  return size_class == size_classes - 1 ? 0.0f : __uint_as_float((1145u - size_class) << 20);
}

// How heavy token blocks are split along the inner dimension (split-K) for kernels that sum over a
// block's members (down.cuh). A block of a sequence's first tokens can have more members than a
// multiprocessor's share of the whole work: all other multiprocessors would wait for it.
struct Splitting {
  uint2* split;     // union.cuh
  uint32* arrived;  // [max_parts * slices], becomes zero
  int max_parts;    // capacity of `split`; 0: nothing is split
  int slices;       // units for each part
  int workers;      // blocks of threads that work on the units
};

// Shorter parts cost more than the balance that they bring: the sums of a part, 64 tokens in fp32, move
// as many bytes to and from L2 as 250 members do.
constexpr uint32 min_part_members = 768;
constexpr int length_candidates = 32;
static_assert(length_candidates == 32, "each lane tries one");

struct UnitSchedule {
  uint32 blocks[size_classes], units[size_classes];  // counts, then the next free place of each class
  uint32 parts[length_candidates];  // of the blocks that are split, at each length
  uint32 members, num_split;   // of all blocks; parts that have a place in `split`
};

__device__ __forceinline__ uint32 parts_of(uint32 members, uint32 length) {
  return members > length ? (members + length - 1) / length : 1;
}
// The first member of a part. Where a part ends depends on the block alone, not on the order of work.
__device__ __forceinline__ uint32 part_start(uint32 members, uint32 part, uint32 parts) {
  return part == parts ? members : part == 0 ? 0 : members * part / parts & ~31u;
}

// The maximum number of members of a part: half of a worker's share of the work, or more if that makes
// more parts than `max_parts`. Called by all threads while `shared.blocks` holds numbers of blocks.
template <int threads>
__device__ uint32 choose_length(UnitSchedule& shared, const Splitting& by) {
  const float share = static_cast<float>(shared.members) * by.slices / (2 * by.workers);
  // Each lane tries a length, a quarter longer than that of the lane before; the warps share the
  // classes.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float length = fmaxf(share, min_part_members);
  for (int i = 0; i < lane; ++i) length *= 1.25f;
  length = ceilf(length);
  uint32 parts = 0;
  for (int size_class = warp; size_class < size_classes; size_class += threads / 32) {
    const float end = class_end(size_class);
    if (end > length) parts += shared.blocks[size_class] * static_cast<uint32>(ceilf(end / length));
  }
  if (parts > 0) atomicAdd(shared.parts + lane, parts);
  __syncthreads();
  // At the last length, 1009 times the first, nothing is split.
  const uint32 fit = __ballot_sync(~0u, shared.parts[lane] <= by.max_parts);
  return static_cast<uint32>(__shfl_sync(~0u, length, __ffs(fit) - 1));
}

// Called by one block of more than `size_classes` threads. Within a class the order differs from run to
// run.
template <int threads, typename TotalOf>
__device__ void schedule_units(UnitSchedule& shared, int blocks, TotalOf total_of, uint2* unit,
                            uint2* order, const Splitting& by, uint32* control) {
  static_assert(threads > size_classes);
  if (threadIdx.x < size_classes) shared.blocks[threadIdx.x] = shared.units[threadIdx.x] = 0;
  if (threadIdx.x < length_candidates) shared.parts[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.members = shared.num_split = 0;
  __syncthreads();
  uint32 length = ~0u;
  if (by.max_parts > 0) {
    for (int i = threadIdx.x; i < by.max_parts * by.slices; i += threads) by.arrived[i] = 0;
    uint32 sum = 0;
    for (int block = threadIdx.x; block < blocks; block += threads) {
      const uint32 members = total_of(block);
      atomicAdd(shared.blocks + class_of(members), 1);
      sum += members;
    }
    atomicAdd(&shared.members, sum);
    __syncthreads();
    length = choose_length<threads>(shared, by);
    __syncthreads();
    if (threadIdx.x < size_classes) shared.blocks[threadIdx.x] = 0;
    __syncthreads();
  }

  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = total_of(block), whole = members / unit_members;
    const uint32 rest = members % unit_members, parts = parts_of(members, length);
    for (uint32 part = 0; part < parts; ++part) {
      const uint32 size = part_start(members, part + 1, parts) - part_start(members, part, parts);
      atomicAdd(shared.blocks + class_of(size), 1);
    }
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
  if (threadIdx.x == size_classes) {
    control[num_units] = units_before;
    control[num_parts] = blocks_before;
  }
  __syncthreads();
  if (threadIdx.x < size_classes) {
    shared.blocks[threadIdx.x] = blocks_before;
    shared.units[threadIdx.x] = units_before;
  }
  __syncthreads();
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = total_of(block), whole = members / unit_members;
    const uint32 parts = parts_of(members, length);
    const uint32 first = parts > 1 ? atomicAdd(&shared.num_split, parts) : 0;
    for (uint32 part = 0; part < parts; ++part) {
      const uint32 start = part_start(members, part, parts);
      const uint32 size = part_start(members, part + 1, parts) - start;
      const uint32 place = parts > 1 ? first + part + 1 : 0;
      order[atomicAdd(shared.blocks + class_of(size), 1)] = make_uint2(place << 16 | block, size);
      if (parts > 1) by.split[first + part] = make_uint2(start, part << 16 | parts);
    }
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
