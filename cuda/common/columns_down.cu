// columns_down: ∇x = ∇up · W_up + ∇gate · W_gate from columns (ColumnsDown of row_sums.cuh has what,
// down.cuh of an architecture how).
#include "common/row_sums.cuh"
#include "down.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    columns_down(const element* w_up_NK, const element* w_gate_NK, int m, int k, const int* offset,
                 const uint32* neuron, const element* d_up, const element* d_gate,
                 const uint2* order, const uint2* split, uint32* arrived, float* sums,
                 uint32* control, element* dx_MK) {
  const ColumnsDown op{offset, neuron, d_up, w_up_NK, d_gate, w_gate_NK};
  const SumWork work{order, split, arrived, sums, control};
  run(op, nullptr, m, k, work, nullptr, dx_MK);
}
