// Products of a token block with the weight rows of its union, for every architecture (up.cuh of sm80
// and sm90): the work units and their epilogues.
//
// A work unit is 64 tokens × 256 members of their block's union. An `Op` defines which neuron a member
// is, and the epilogue:
//
//   members(block), neuron(m)   a block's union, and the neuron that one of its words means
//   name(unit, i)               what the others call member `i` of a unit; never `no_entry`
//   fetch(unit, name, place, a, b)   what `finish` needs beside the sums
//   finish(unit, i, name, place, sums, a, b)   the rounded sums of a member and the four tokens
//                               from `place` on (token_at); returns what `end` gets the sum of
//   end(unit, warp, sum)        once per warp of `part_warps`
//   shifts, shift()   whether there is something to add to every sum, before it is rounded, and what
#pragma once
#include "common/columns.cuh"
#include "common/tile_scheduler.cuh"

namespace {
constexpr int part_warps = 8;

// A unit: a block's members from number 256·chunk on.
struct Part {
  int block, chunk, members;  // there may be more than 256 from there on

  __device__ __forceinline__ Part(const WorkUnit& unit)
      : block(unit.a >> 16), chunk(unit.a & 0xffffu), members(unit.b) {}
  __device__ __forceinline__ int start() const { return chunk * unit_members; }
};
}  // namespace
