// columns_grad: the gradients of gate and up at their non-zeros (ColumnsGrad of products.cuh has what,
// up.cuh of an architecture how).
#include "up.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    columns_grad(const __grid_constant__ TensorMap map_of_dy, const element* dy_MK,
                 const int* token_M, int m, const element* w_down_NK, int k, const int* offset,
                 const uint32* neuron, const element* gate, const element* up, const float* l1,
                 const uint2* unit, uint32* control, element* d_gate, element* d_up) {
  await_previous_kernel();
  const ColumnsGrad op{offset, neuron, gate, up, *l1, d_gate, d_up};
  run(op, Tokens{map_of_dy, dy_MK, token_M, m}, w_down_NK, k, unit, control);
}
