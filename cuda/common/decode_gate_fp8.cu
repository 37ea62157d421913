// decode_gate_fp8: decode_gate whose first matrix is e4m3 with a scale per neuron, (x · Wᵀ) * scale.
#include "common/decode_gate.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    decode_gate_fp8(const element* x_MK, const unsigned char* w_NK, const float* scale_N, const element* bias_N,
                const element* w_up_NK, const element* bias_up_N, const element* w_down_NK,
                uint32 m, uint32 n, uint32 k, float threshold, int relu_up, uint32 stride,
                uint32* count, uint16* neuron, element* value) {
  run_decode_gate(x_MK, w_NK, scale_N, bias_N, w_up_NK, bias_up_N, w_down_NK, m, n, k, threshold,
                  relu_up, stride, count, neuron, value);
}
