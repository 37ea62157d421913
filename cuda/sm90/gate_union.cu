// gate_union: relu(x · Wᵀ), kept as the union format (common/union.cuh) instead of a dense M × N
// matrix (sm90/gate.cuh has how).
#include "sm90/pack_union.cuh"

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(gate_threads, 1)
    gate_union(const __grid_constant__ TensorMap map_of_x, const element* x_MK, const int* token_M,
               const __grid_constant__ TensorMap w_NK, const element* bias_N, int m, int n, int k,
               float threshold, uint32* count, unsigned char* neuron, element* value,
               uint32* control, const float* x_scale_M, const float* w_scale_N) {
  run_gate(map_of_x, ScatteredTokens{x_MK, token_M}, w_NK, Scales{x_scale_M, w_scale_N}, bias_N, m, n,
           k, threshold, control, PackUnion{m, count, neuron, value});
}
