// columns_down: ∇x = ∇up · W_up + ∇gate · W_gate from columns (columns.cuh; down.cuh has how); without
// a gate the first alone.
#include "common/columns.cuh"
#include "sm90/down.cuh"

namespace {
struct ColumnsDown {
  const int* offset;
  const uint32* member;
  const bf16 *d_up, *w_up, *d_gate, *w_gate;  // the latter two: null without a gate

  static constexpr bool rare = false;

  __device__ int num_sources() const { return d_gate == nullptr ? 1 : 2; }
  __device__ const uint32* members(int block) const { return member + offset[block]; }
  __device__ uint32 neuron(uint32 member) const { return member; }
  __device__ const bf16* columns(int source, int block, int first) const {
    const uint64 start = offset[block] + first;
    return (source == 0 ? d_up : d_gate) + start * block_tokens;
  }
  __device__ uint32 place(uint32, int i) const { return i * block_tokens; }
  __device__ const bf16* weights(int source) const { return source == 0 ? w_up : w_gate; }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    columns_down(const bf16* w_up_NK, const bf16* w_gate_NK, int m, int k, const int* offset,
                 const uint32* neuron, const bf16* d_up, const bf16* d_gate, const uint2* order,
                 const uint2* split, uint32* arrived, float* sums, uint32* control, bf16* dx_MK) {
  const ColumnsDown op{offset, neuron, d_up, w_up_NK, d_gate, w_gate_NK};
  const Shares shares{order, split, arrived, sums, control};
  run(op, nullptr, m, k, shares, nullptr, dx_MK);
}

extern "C" __device__ const uint32 columns_down_shared_bytes = shared_bytes;
