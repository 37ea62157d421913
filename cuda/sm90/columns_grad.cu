// columns_grad: the gradients of gate and up at their non-zeros (up.cuh has how).
//
// ∇h = ∇y · W_downᵀ on the pattern, + λ · sign(h) for the L1 term, λ being the gradient of Σ|h|;
// ∇up = ∇h * gate, ∇gate = ∇h * up where the gate fires. Without a gate ∇up = ∇h where h is not 0,
// and `up` holds h.
#include "common/columns.cuh"
#include "sm90/up.cuh"

namespace {
struct ColumnsGrad {
  static constexpr bool shifts = true;
  const int* offset;
  const uint32* member;
  const bf16 *gate, *up;  // gate: null without one
  float lambda;
  bf16 *d_gate, *d_up;

  // Without a gate every h that fires is positive. Added after the sums are rounded, λ would be
  // rounded alike for all neurons of a token.
  __device__ float shift() const { return gate == nullptr ? lambda : 0.0f; }
  __device__ const uint32* members(int block) const { return member + offset[block]; }
  __device__ uint32 neuron(uint32 member) const { return member; }

  __device__ __forceinline__ uint32 name(const Part& part, int i) const {
    return offset[part.block] + part.start() + i;
  }
  __device__ __forceinline__ void fetch(const Part&, uint32 name, uint2& of_gate,
                                        uint2& of_up) const {
    of_up = column_part(up, name);
    of_gate = gate == nullptr ? of_up : column_part(gate, name);
  }

  // ∇h of one token, zero where it does not fire; selections, no branches.
  __device__ __forceinline__ float d_h(float sum, float fires, float h) const {
    const float l1 = h == 0.0f || gate == nullptr ? 0.0f : copysignf(lambda, h);
    return fires == 0.0f ? 0.0f : sum + l1;
  }
  __device__ __forceinline__ float2 d_h(uint32 sums, uint32 fires, uint32 h) const {
    return make_float2(d_h(bf16_low(sums), bf16_low(fires), bf16_low(h)),
                       d_h(bf16_high(sums), bf16_high(fires), bf16_high(h)));
  }

  __device__ __forceinline__ float finish(const Part&, int, uint32 name, uint2 sums, uint2 of_gate,
                                          uint2 of_up) const {
    constexpr uint32 ones = 0x3f803f80u;
    const bool gated = gate != nullptr;
    const uint2 factor = gated ? of_gate : make_uint2(ones, ones);
    const float2 x = d_h(sums.x, of_gate.x, multiply_bf16(factor.x, of_up.x));
    const float2 y = d_h(sums.y, of_gate.y, multiply_bf16(factor.y, of_up.y));
    *column_part(d_up, name) = make_uint2(scaled(x, factor.x), scaled(y, factor.y));
    if (gated) *column_part(d_gate, name) = make_uint2(scaled(x, of_up.x), scaled(y, of_up.y));
    return 0.0f;
  }
  static __device__ __forceinline__ uint32 scaled(float2 d_h, uint32 pair) {
    return pack_bf16(d_h.x * bf16_low(pair), d_h.y * bf16_high(pair));
  }

  __device__ __forceinline__ void end(const Part&, float) const {}
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    columns_grad(const __grid_constant__ TensorMap map_of_dy, const bf16* dy_MK, const int* token_M,
                 int m, const bf16* w_down_NK, int k, const int* offset, const uint32* neuron, const bf16* gate, const bf16* up,
                 const float* l1, const uint2* unit, uint32* control, bf16* d_gate, bf16* d_up) {
  await_previous_kernel();
  const ColumnsGrad op{offset, neuron, gate, up, *l1, d_gate, d_up};
  run(op, Tokens{map_of_dy, dy_MK, token_M, m}, w_down_NK, k, unit, control);
}

extern "C" __device__ const uint32 columns_grad_shared_bytes = shared_bytes;
