// Sums of weight rows over a token block's union, for every architecture (down.cuh of sm80 and sm90):
// the operands. An `Op` defines where they are:
//
//   num_sources()                the number of pairs of columns and weights to sum, at most
//                                `max_sources`
//   members(block), neuron(m)    a block's union, and the neuron that one of its words means
//   columns(source, block, i)    64 values for each member from the block's i-th on, 16-byte aligned
//   place(m, i)                  where from there on those of member i begin, whose word is m
//   weights(source)              (N, K), one row per neuron
//   rare                         whether L2 should evict the columns before the weights
#pragma once
#include "common/columns.cuh"

namespace {
// y = h · W + b, h in the union format, W neuron by neuron: W_downᵀ as `nn.Linear` stores it.
struct UnionDown {
  const uint32* entry;
  const element *value, *w;
  int tiles_n;

  __device__ uint64 base(int block) const {
    return static_cast<uint64>(block) * tiles_n * tile_neurons;
  }
  static constexpr bool rare = false;
  static constexpr int max_sources = 1;

  __device__ int num_sources() const { return 1; }
  __device__ const uint32* members(int block) const { return entry + base(block); }
  __device__ uint32 neuron(uint32 member) const { return entry_neuron(member); }
  __device__ const element* columns(int, int block, int) const {
    return value + base(block) * block_tokens;
  }
  __device__ uint32 place(uint32 member, int) const { return entry_slot(member) * block_tokens; }
  __device__ const element* weights(int) const { return w; }
};
// ∇x = ∇up · W_up + ∇gate · W_gate from columns; without a gate the first alone.
struct ColumnsDown {
  const int* offset;
  const uint32* member;
  const element *d_up, *w_up, *d_gate, *w_gate;  // the latter two: null without a gate

  static constexpr bool rare = false;
  static constexpr int max_sources = 2;

  __device__ int num_sources() const { return d_gate == nullptr ? 1 : 2; }
  __device__ const uint32* members(int block) const { return member + offset[block]; }
  __device__ uint32 neuron(uint32 member) const { return member; }
  __device__ const element* columns(int source, int block, int first) const {
    const uint64 start = offset[block] + first;
    return (source == 0 ? d_up : d_gate) + start * block_tokens;
  }
  __device__ uint32 place(uint32, int i) const { return i * block_tokens; }
  __device__ const element* weights(int source) const { return source == 0 ? w_up : w_gate; }
};
}  // namespace
