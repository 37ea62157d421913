// union_up: h = gate * (x · W_upᵀ + b) on the union format, in place of the gate (UnionUp of
// products.cuh has what, up.cuh of an architecture how).
#include "up.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    union_up(const __grid_constant__ TensorMap map_of_x, const element* x_MK, const int* token_M,
             int m, const element* w_NK, const element* bias_N, int k, int tiles_n,
             const uint32* entry, const uint2* unit, uint32* control, element* value,
             const int* offset, element* up, uint64 capacity, float* l1, int relu_up) {
  const Kept kept{offset, up, static_cast<uint32>(capacity), l1};
  const UnionUp op{entry, value, bias_N, tiles_n, kept, relu_up != 0};
  run(op, Tokens{map_of_x, x_MK, token_M, m}, w_NK, k, unit, control);
}
