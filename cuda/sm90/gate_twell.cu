// gate_twell: relu(x · Wᵀ), kept as TwELL (common/twell.cuh) instead of a dense M × N matrix
// (sm90/gate.cuh has how).
#include "sm90/pack_twell.cuh"

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(gate_threads, 1)
    gate_twell(const __grid_constant__ TensorMap x_MK, const __grid_constant__ TensorMap w_NK,
               const element* bias_N, int m, int n, int k, float threshold, int width, uint32* word,
               uint32* control, const float* x_scale_M, const float* w_scale_N) {
  const uint32 tiles = (n + tile_n - 1) / tile_n, words = width;
  run_gate(x_MK, ScatteredTokens{}, w_NK, Scales{x_scale_M, w_scale_N}, bias_N, m, n, k, threshold,
           control, PackTwell{m, words, tiles * words, word});
}
