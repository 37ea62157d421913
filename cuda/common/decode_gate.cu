// decode_gate: the gate of up to 64 tokens, and up where it fires; see decode_gate.cuh.
#include "common/decode_gate.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    decode_gate(const element* x_MK, const element* w_NK, const element* bias_N,
                const element* w_up_NK, const element* bias_up_N, const element* w_down_NK,
                uint32 m, uint32 n, uint32 k, float threshold, int relu_up, uint32 stride,
                uint32* count, uint16* neuron, element* value) {
  run_decode_gate(x_MK, w_NK, nullptr, bias_N, w_up_NK, bias_up_N, w_down_NK, m, n, k, threshold,
                  relu_up, stride, count, neuron, value);
}
