// Sums of weight rows over a token block's union, for every architecture (down.cuh of sm80 and sm90):
// what is common to them. An `Op` defines where the operands are:
//
//   num_sources()                the number of pairs of columns and weights to sum, at most
//                                `max_sources`
//   members(block), neuron(m)    a block's union, and the neuron that one of its words means
//   columns(source, block, i)    64 values for each member from the block's i-th on, 16-byte aligned
//   place(m, i)                  where from there on those of member i begin, whose word is m
//   weights(source)              (N, K), one row per neuron
//   rare                         whether L2 should evict the columns before the weights
//
// A heavy block's sum is split (split-K): each work unit stores its partial sums in memory, and the unit
// that finishes last adds all of them, in the order of the parts, so that the result is deterministic.
//
// A `Tile` says which of a unit's sums a thread holds:
//
//   Values, at(d, i)   its sums, and the i-th of them
//   quads              the number of its sums, divided by four
//   threads            the number of threads that hold sums
//   thread(), sync()   this thread's number among them, and a barrier for them
#pragma once
#include "common/columns.cuh"

namespace {
// Counts one part as stored. Returns true for the last part: then the sums of all parts can be read.
// Called by all threads that hold sums.
template <typename Tile>
__device__ __forceinline__ bool is_last_part(bool& last, uint32* arrived, int parts) {
  __threadfence();
  Tile::sync();
  if (Tile::thread() == 0) last = atomicAdd(arrived, 1) == parts - 1;
  Tile::sync();
  if (last) __threadfence();
  return last;
}

// Where a thread keeps its sums of one part, by four, and after how many fours the next ones lie.
struct SumsPlace {
  float4* at;
  int stride;
};

template <typename Tile>
__device__ __forceinline__ void store_sums(const SumsPlace& to, typename Tile::Values& d) {
#pragma unroll
  for (int i = 0; i < Tile::quads; ++i)
    __stcg(to.at + i * to.stride, make_float4(Tile::at(d, 4 * i), Tile::at(d, 4 * i + 1),
                                              Tile::at(d, 4 * i + 2), Tile::at(d, 4 * i + 3)));
}

// Adds the sums of all parts to `d`, in their order; `place_of(part)` is where those of one are.
template <typename Tile, typename PlaceOf>
__device__ __forceinline__ void add_sums(int parts, PlaceOf place_of, typename Tile::Values& d) {
  for (int part = 0; part < parts; ++part) {
    const SumsPlace from = place_of(part);
#pragma unroll
    for (int i = 0; i < Tile::quads; ++i) {
      const float4 more = __ldcg(from.at + i * from.stride);
      Tile::at(d, 4 * i) += more.x;
      Tile::at(d, 4 * i + 1) += more.y;
      Tile::at(d, 4 * i + 2) += more.z;
      Tile::at(d, 4 * i + 3) += more.w;
    }
  }
}

// The work of a kernel that sums over a block's members (union.cuh, units.cuh).
struct SumWork {
  const uint2* order;
  const uint2* split;  // null where nothing is split
  uint32* arrived;     // [splits][units_k]: at a block's first part, how many of its parts are stored
  float* sums;         // [splits][units_k][sums of a unit], in the order of the threads
  uint32* control;
};

// Fields of the first word of a unit in `order`: the block, and 1 + the place in `split` (0: not split).
__device__ __forceinline__ int block_of(uint32 word) { return word & 0xffffu; }
__device__ __forceinline__ uint32 split_of(uint32 word) { return word >> 16; }

template <typename Tile>
__device__ __forceinline__ SumsPlace sums_of(const SumWork& work, int place, int units_k, int slice) {
  const uint64 unit = static_cast<uint64>(place) * units_k + slice;
  float* const sums = work.sums + unit * (4 * Tile::quads * Tile::threads);
  return {reinterpret_cast<float4*>(sums) + Tile::thread(), Tile::threads};
}

// Stores the sums of one part of a heavy block. Returns true for the last part: then `d` holds the sums
// of all parts.
template <typename Tile>
__device__ __forceinline__ bool add_parts(bool& last, const SumWork& work, int place, int units_k,
                                          int slice, typename Tile::Values& d) {
  const uint2 split = work.split[place];
  const int parts = split.y & 0xffffu, first = place - (split.y >> 16);
  store_sums<Tile>(sums_of<Tile>(work, place, units_k, slice), d);
  if (!is_last_part<Tile>(last, work.arrived + first * units_k + slice, parts)) return false;
#pragma unroll
  for (int i = 0; i < 4 * Tile::quads; ++i) Tile::at(d, i) = 0.0f;
  add_sums<Tile>(
      parts, [&](int part) { return sums_of<Tile>(work, first + part, units_k, slice); }, d);
  return true;
}
}  // namespace
