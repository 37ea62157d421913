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
#include "common/activation.cuh"
#include "common/columns.cuh"

namespace {
constexpr int part_warps = 8;

// A unit: members 256·chunk and on of a block's union.
struct Part {
  int block, chunk, members;  // there may be more than 256 from there on

  __device__ __forceinline__ int start() const { return chunk * unit_members; }
};

// Where the tokens are: rows of a matrix, and its map for TMA, which is of use where `row_of`, the row of
// each token, is null.
struct Tokens {
  const TensorMap& map;
  const element* x;
  const int* row_of;
  int m;
};

// h = gate * (x · W_upᵀ + b) on the union format, in place of the gate. For training it also keeps
// x · W_upᵀ + b, compact (columns.cuh), and adds up |h|.
// What training keeps; null pointers at inference.
struct Kept {
  const int* offset;
  element* up;
  uint32 capacity;  // columns of `up`
  float* l1;        // [blocks][tiles_n][part_warps]
};

struct UnionUp {
  static constexpr bool shifts = false;
  const uint32* entry;
  element* value;
  const element* bias;
  int tiles_n;
  Kept kept;
  bool relu;  // of up, before the product (dReLU)

  __device__ uint64 base(int block) const {
    return static_cast<uint64>(block) * tiles_n * tile_neurons;
  }
  __device__ float shift() const { return 0.0f; }
  __device__ const uint32* members(int block) const { return entry + base(block); }
  __device__ uint32 neuron(uint32 member) const { return entry_neuron(member); }

  __device__ __forceinline__ uint32 name(const Part& part, int i) const {
    return members(part.block)[part.start() + i];
  }
  template <typename Place>
  __device__ __forceinline__ uint2* column(int block, uint32 name, Place place) const {
    return column_part(value + base(block) * block_tokens, entry_slot(name), place);
  }
  template <typename Place>
  __device__ __forceinline__ void fetch(const Part& part, uint32 name, Place place, uint2& gate,
                                        uint2&) const {
    gate = *column(part.block, name, place);
  }

  template <typename Place>
  __device__ __forceinline__ float finish(const Part& part, int i, uint32 name, Place place, uint2 up,
                                          uint2 gate, uint2) const {
    if (bias != nullptr) {
      const float add = element_low(bias[entry_neuron(name)]);
      up = make_uint2(pack_elements(element_low(up.x) + add, element_high(up.x) + add),
                      pack_elements(element_low(up.y) + add, element_high(up.y) + add));
    }
    if (relu) up = make_uint2(relu_elements(up.x), relu_elements(up.y));
    const uint2 h = make_uint2(multiply_elements(gate.x, up.x), multiply_elements(gate.y, up.y));
    *column(part.block, name, place) = h;
    if (kept.l1 == nullptr) return 0.0f;
    const uint32 at = kept.offset[part.block] + part.start() + i;
    if (at < kept.capacity) *column_part(kept.up, at, place) = up;
    return sum_abs(h.x) + sum_abs(h.y);
  }

  __device__ __forceinline__ void end(const Part& part, int warp, float sum) const {
    if (kept.l1 == nullptr) return;
    sum = add_warp(sum);
    if (threadIdx.x % 32 == 0) kept.l1[(part.block * tiles_n + part.chunk) * part_warps + warp] = sum;
  }
};
// The gradients of gate and up at their non-zeros.
//
// ∇h = ∇y · W_downᵀ on the pattern, + λ · sign(h) for the L1 term, λ being the gradient of Σ|h|;
// ∇up = ∇h * gate, ∇gate = ∇h * up * slope(gate) where the gate fires. Without a gate `up` holds h, and
// ∇up = ∇h * slope(h) where h is not 0.
struct ColumnsGrad {
  static constexpr bool shifts = true;
  const int* offset;
  const uint32* member;
  const element *gate, *up;  // gate: null without one
  float lambda;
  element *d_gate, *d_up;

  // Without a gate every h that fires is positive. Added after the sums are rounded, λ would be
  // rounded alike for all neurons of a token.
  __device__ float shift() const { return gate == nullptr ? lambda : 0.0f; }
  __device__ const uint32* members(int block) const { return member + offset[block]; }
  __device__ uint32 neuron(uint32 member) const { return member; }

  __device__ __forceinline__ uint32 name(const Part& part, int i) const {
    return offset[part.block] + part.start() + i;
  }
  template <typename Place>
  __device__ __forceinline__ void fetch(const Part&, uint32 name, Place place, uint2& of_gate,
                                        uint2& of_up) const {
    of_up = column_part(up, name, place);
    of_gate = gate == nullptr ? of_up : column_part(gate, name, place);
  }

  // ∇h of one token, zero where it does not fire; selections, no branches.
  __device__ __forceinline__ float d_h(float sum, float fires, float h) const {
    const float l1 = h == 0.0f || gate == nullptr ? 0.0f : copysignf(lambda, h);
    return fires == 0.0f ? 0.0f : sum + l1;
  }
  __device__ __forceinline__ float2 d_h(uint32 sums, uint32 fires, uint32 h) const {
    return make_float2(d_h(element_low(sums), element_low(fires), element_low(h)),
                       d_h(element_high(sums), element_high(fires), element_high(h)));
  }

  template <typename Place>
  __device__ __forceinline__ float finish(const Part&, int, uint32 name, Place place, uint2 sums,
                                          uint2 of_gate, uint2 of_up) const {
    const bool gated = gate != nullptr;
    const uint2 factor = gated ? of_gate : make_uint2(two_ones, two_ones);
    const float2 x = d_h(sums.x, of_gate.x, multiply_elements(factor.x, of_up.x));
    const float2 y = d_h(sums.y, of_gate.y, multiply_elements(factor.y, of_up.y));
    // Before any condition: as part of one it would be a branch.
    const float2 of_x = slopes(of_gate.x), of_y = slopes(of_gate.y);
    *column_part(d_up, name, place) = make_uint2(scaled(x, factor.x, unless(gated, of_x)),
                                                 scaled(y, factor.y, unless(gated, of_y)));
    if (gated)
      *column_part(d_gate, name, place) =
          make_uint2(scaled(x, of_up.x, of_x), scaled(y, of_up.y, of_y));
    return 0.0f;
  }
  static __device__ __forceinline__ float2 slopes(uint32 fires) {
    return make_float2(slope(element_low(fires)), slope(element_high(fires)));
  }
  static __device__ __forceinline__ float2 unless(bool ones, float2 slopes) {
    return make_float2(ones ? 1.0f : slopes.x, ones ? 1.0f : slopes.y);
  }
  static __device__ __forceinline__ uint32 scaled(float2 d_h, uint32 pair, float2 slopes) {
    return pack_elements(d_h.x * element_low(pair) * slopes.x,
                         d_h.y * element_high(pair) * slopes.y);
  }

  __device__ __forceinline__ void end(const Part&, int, float) const {}
};
}  // namespace
