// Columns: the union format in compact form, which training keeps from forward to backward.
//
// The members of all blocks' unions are concatenated, E in all, of which up to `capacity` are stored.
// Block b has members offset[b] to offset[b + 1], with ascending neurons.
//
//   offset  [blocks + 1]  int32
//   neuron  [capacity]    int32
//   mask    [capacity]    uint64   bit t: it is active for token t of the block, of 64
//   gate, up, and their gradients  [capacity][64]  element, tokens in the order of token_at
//
// Members past the capacity are not stored: the host reads offset[blocks] and recomputes the pattern.
#pragma once
#include "common/element.cuh"
#include "common/union.cuh"

// Four values of a column, from `place` on: an int, or a type that converts to one. A kernel's own type
// lets the compiler see how the place is computed before it decides what to unroll.
template <typename Place>
__device__ __forceinline__ uint2* column_part(element* columns, uint32 at, Place place) {
  return reinterpret_cast<uint2*>(columns + static_cast<uint64>(at) * block_tokens +
                                  static_cast<int>(place));
}
template <typename Place>
__device__ __forceinline__ uint2 column_part(const element* columns, uint32 at, Place place) {
  return *column_part(const_cast<element*>(columns), at, place);
}

__device__ __forceinline__ float sum_abs(uint32 pair) {
  return fabsf(element_low(pair)) + fabsf(element_high(pair));
}
