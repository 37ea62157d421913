// columns_down: ∇x = ∇up · W_up + ∇gate · W_gate from columns; without a gate only the first product
// (an architecture's down.cuh says how).
#include "down.cuh"

namespace {
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

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    columns_down(const element* w_up_NK, const element* w_gate_NK, int m, int k, const int* offset,
                 const uint32* neuron, const element* d_up, const element* d_gate,
                 const uint2* order, const uint2* split, uint32* arrived, float* sums,
                 uint32* control, element* dx_MK) {
  const ColumnsDown op{offset, neuron, d_up, w_up_NK, d_gate, w_gate_NK};
  const SumWork work{order, split, arrived, sums, control};
  run(op, nullptr, m, k, work, nullptr, dx_MK);
}
