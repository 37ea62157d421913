// columns_grad: the gradients of gate and up at their non-zeros (an architecture's up.cuh says how).
//
// ∇h = ∇y · W_downᵀ on the pattern, + λ · sign(h) for the L1 term, λ being the gradient of Σ|h|;
// ∇up = ∇h * gate, ∇gate = ∇h * up * slope(gate) where the neuron is active. Without a gate `up` holds h, λ is
// the gradient of Σ relu(z), and ∇up = ∇h * slope(h) + λ where h is not 0.
#include "common/activation.cuh"
#include "up.cuh"

namespace {
// Where the columns of a pattern lie, and whose they are.
struct Columns {
  const int* offset;
  const uint32* member;

  __device__ const uint32* members(int block) const { return member + offset[block]; }
  __device__ uint32 neuron(uint32 member) const { return member; }
  __device__ __forceinline__ uint32 name(const Part& part, int i) const {
    return offset[part.block] + part.start() + i;
  }
  __device__ __forceinline__ void end(const Part&, int, float) const {}
};

struct ColumnsGrad : Columns {
  static constexpr bool shifts = true;
  const element *gate, *up;  // gate: null without one
  float lambda;
  element *d_gate, *d_up;

  // Without a gate every h that is not zero is positive. Added after the sums are rounded, λ would be
  // rounded alike for all neurons of a token.
  __device__ float shift() const { return gate == nullptr ? lambda : 0.0f; }

  template <typename Place>
  __device__ __forceinline__ void fetch(const Part&, uint32 name, Place place, uint2& of_gate,
                                        uint2& of_up) const {
    of_up = column_part(up, name, place);
    of_gate = gate == nullptr ? of_up : column_part(gate, name, place);
  }

  // ∇h of one token, zero where the neuron is not active; selections, no branches.
  __device__ __forceinline__ float d_h(float sum, float active, float h) const {
    const float l1 = h == 0.0f || gate == nullptr ? 0.0f : copysignf(lambda, h);
    return active == 0.0f ? 0.0f : sum + l1;
  }
  __device__ __forceinline__ float2 d_h(uint32 sums, uint32 active, uint32 h) const {
    return make_float2(d_h(element_low(sums), element_low(active), element_low(h)),
                       d_h(element_high(sums), element_high(active), element_high(h)));
  }

  template <typename Place>
  __device__ __forceinline__ float finish(const Part&, int, uint32 name, Place place, uint2 sums,
                                          uint2 of_gate, uint2 of_up) const {
    const bool gated = gate != nullptr;
    const uint2 factor = gated ? of_gate : make_uint2(two_ones, two_ones);
    const float2 x = d_h(sums.x, of_gate.x, multiply_elements(factor.x, of_up.x));
    const float2 y = d_h(sums.y, of_gate.y, multiply_elements(factor.y, of_up.y));
    // Computed before any condition: within one it would become a branch.
    const float2 of_x = slopes(of_gate.x), of_y = slopes(of_gate.y);
    *column_part(d_up, name, place) = make_uint2(scaled(x, factor.x, unless(gated, of_x)),
                                                 scaled(y, factor.y, unless(gated, of_y)));
    if (gated)
      *column_part(d_gate, name, place) =
          make_uint2(scaled(x, of_up.x, of_x), scaled(y, of_up.y, of_y));
    return 0.0f;
  }
  static __device__ __forceinline__ float2 slopes(uint32 active) {
    return make_float2(slope(element_low(active)), slope(element_high(active)));
  }
  static __device__ __forceinline__ float2 unless(bool ones, float2 slopes) {
    return make_float2(ones ? 1.0f : slopes.x, ones ? 1.0f : slopes.y);
  }
  static __device__ __forceinline__ uint32 scaled(float2 d_h, uint32 pair, float2 slopes) {
    return pack_elements(d_h.x * element_low(pair) * slopes.x,
                         d_h.y * element_high(pair) * slopes.y);
  }
};

// Without a gate, for activations other than ReLU. In `ColumnsGrad`, λ after the slope would take registers
// that there are none of on Hopper.
struct UngatedColumnsGrad : Columns {
  static constexpr bool shifts = false;
  const element* h;
  float lambda;
  element* d_up;

  __device__ float shift() const { return 0.0f; }

  template <typename Place>
  __device__ __forceinline__ void fetch(const Part&, uint32 name, Place place, uint2& of_h,
                                        uint2&) const {
    of_h = column_part(h, name, place);
  }
  template <typename Place>
  __device__ __forceinline__ float finish(const Part&, int, uint32 name, Place place, uint2 sums,
                                          uint2 of_h, uint2) const {
    *column_part(d_up, name, place) = make_uint2(d_z(sums.x, of_h.x), d_z(sums.y, of_h.y));
    return 0.0f;
  }
  __device__ __forceinline__ uint32 d_z(uint32 sums, uint32 h) const {
    return pack_elements(d_z(element_low(sums), element_low(h)),
                         d_z(element_high(sums), element_high(h)));
  }
  __device__ __forceinline__ float d_z(float sum, float h) const {
    const float d_z = sum * slope(h) + lambda;
    return h == 0.0f ? 0.0f : d_z;
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    columns_grad(const __grid_constant__ TensorMap map_of_dy, const element* dy_MK,
                 const int* token_M, int m, const element* w_down_NK, int k, const int* offset,
                 const uint32* neuron, const element* gate, const element* up, const float* l1,
                 const uint2* unit, uint32* control, element* d_gate, element* d_up) {
  await_previous_kernel();
  const Tokens tokens{map_of_dy, dy_MK, token_M, m};
  if constexpr (!is_relu()) {
    const UngatedColumnsGrad ungated{{offset, neuron}, up, *l1, d_up};
    if (gate == nullptr) return run(ungated, tokens, w_down_NK, k, unit, control);
  }
  const ColumnsGrad op{{offset, neuron}, gate, up, *l1, d_gate, d_up};
  run(op, tokens, w_down_NK, k, unit, control);
}
