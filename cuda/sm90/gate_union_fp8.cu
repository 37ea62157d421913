// gate_union_fp8: gate_union of e4m3, with a scale per token and per neuron: (x_scale x) · (w_scale W)ᵀ.
#include "sm90/pack_union.cuh"

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(gate_threads, 1)
    gate_union_fp8(const __grid_constant__ TensorMap x_MK, const float* x_scale_M,
                   const __grid_constant__ TensorMap w_NK, const float* w_scale_N,
                   const element* bias_N, int m, int n, int k, float threshold, uint32* count,
                   unsigned char* neuron, element* value, uint32* control) {
  run_gate<E4m3>(x_MK, ScatteredTokens{}, w_NK, Scales{x_scale_M, w_scale_N}, bias_N, m, n, k,
                 threshold, control, PackUnion{m, count, neuron, value});
}
