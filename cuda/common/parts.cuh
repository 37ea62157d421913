// Sums that several work units share: each leaves its part in memory, and the one that ends last adds
// them up, in the order of the parts: the same bits every time.
//
// A `Tile` says which of a unit's sums a thread has:
//
//   Values, at(d, i)   its sums, and the i-th of them
//   quads              how many fours of sums that is
//   threads            how many threads have a Tile
//   thread(), sync()   this one's number among them, and a barrier for them
#pragma once
#include "common/union.cuh"

namespace {
// Counts a part of a sum as done, whose sums this thread has written to memory. True where it was the
// last: then those of all parts are there to be read. All threads that have a Tile call it.
template <typename Tile>
__device__ __forceinline__ bool is_last_part(bool& last, uint32* arrived, int parts) {
  __threadfence();
  Tile::sync();
  if (Tile::thread() == 0) last = atomicAdd(arrived, 1) == parts - 1;
  Tile::sync();
  if (last) __threadfence();
  return last;
}

template <typename Tile>
__device__ __forceinline__ void leave_sums(float4* to, int stride, const typename Tile::Values& d) {
#pragma unroll
  for (int i = 0; i < Tile::quads; ++i)
    __stcg(to + i * stride, make_float4(Tile::at(d, 4 * i), Tile::at(d, 4 * i + 1),
                                        Tile::at(d, 4 * i + 2), Tile::at(d, 4 * i + 3)));
}
template <typename Tile>
__device__ __forceinline__ void add_sums(const float4* from, int stride, typename Tile::Values& d) {
#pragma unroll
  for (int i = 0; i < Tile::quads; ++i) {
    const float4 more = __ldcg(from + i * stride);
    Tile::at(d, 4 * i) += more.x;
    Tile::at(d, 4 * i + 1) += more.y;
    Tile::at(d, 4 * i + 2) += more.z;
    Tile::at(d, 4 * i + 3) += more.w;
  }
}

// What the units of a list have in common (union.cuh, units.cuh), for kernels that sum over a block's
// members.
struct Shares {
  const uint2* order;
  const uint2* split;  // null where nothing is split
  uint32* arrived;     // [splits][units_k]: of a block's first part, how many of its parts are done
  float* sums;         // [splits][units_k][a unit's], in the order of the threads that hold them
  uint32* control;
};

// Of the first word of a unit in `order`: the block, and one more than the place in `split`, or 0.
__device__ __forceinline__ int block_of(uint32 word) { return word & 0xffffu; }
__device__ __forceinline__ uint32 split_of(uint32 word) { return word >> 16; }

// This thread's sums of one part, fours that lie `Tile::threads` apart.
template <typename Tile>
__device__ __forceinline__ float4* sums_of(const Shares& shares, int place, int units_k, int slice) {
  const uint64 unit = static_cast<uint64>(place) * units_k + slice;
  return reinterpret_cast<float4*>(shares.sums + unit * (4 * Tile::quads * Tile::threads)) +
         Tile::thread();
}

// A part of a heavy block. True where all parts are there: then `d` are the sums of all.
template <typename Tile>
__device__ __forceinline__ bool add_parts(bool& last, const Shares& shares, int place, int units_k,
                                          int slice, typename Tile::Values& d) {
  const uint2 split = shares.split[place];
  const int parts = split.y & 0xffffu, first = place - (split.y >> 16);
  leave_sums<Tile>(sums_of<Tile>(shares, place, units_k, slice), Tile::threads, d);
  if (!is_last_part<Tile>(last, shares.arrived + first * units_k + slice, parts)) return false;
#pragma unroll
  for (int i = 0; i < 4 * Tile::quads; ++i) Tile::at(d, i) = 0.0f;
  for (int part = 0; part < parts; ++part)
    add_sums<Tile>(sums_of<Tile>(shares, first + part, units_k, slice), Tile::threads, d);
  return true;
}
}  // namespace
