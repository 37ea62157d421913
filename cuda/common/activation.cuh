// The activation that a kernel is compiled for: its value as a function of r = relu(z); its slope where
// z > 0, and r, as functions of a = act(z), the value that the formats keep. The default is ReLU. For
// another one `sparsellm/ffn/activations.py` has fp32 expressions of r and of a, which are passed as
// SPARSELLM_VALUE, SPARSELLM_SLOPE and SPARSELLM_INVERSE.
#pragma once
#include "common/element.cuh"

#ifdef SPARSELLM_VALUE
__device__ __forceinline__ float root(float a) {
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// The activation of one value or of a pair, after relu; rounded as a dense model rounds it. NaN passes.
__device__ __forceinline__ float activated(float r) { return SPARSELLM_VALUE; }
__device__ __forceinline__ uint32 activated(uint32 pair) {
  return pack_elements(activated(element_low(pair)), activated(element_high(pair)));
}

__device__ constexpr bool is_relu() { return false; }
__device__ __forceinline__ float slope(float a) { return SPARSELLM_SLOPE; }
__device__ __forceinline__ float inverse(float a) { return SPARSELLM_INVERSE; }
#else
__device__ constexpr bool is_relu() { return true; }
__device__ __forceinline__ uint32 activated(uint32 pair) { return pair; }
__device__ __forceinline__ float slope(float) { return 1.0f; }
__device__ __forceinline__ float inverse(float a) { return a; }
#endif

// The activation of a pair of gates: values up to the threshold, which is not negative, become +0; NaN
// stays NaN.
__device__ __forceinline__ uint32 activate(uint32 pair, float threshold) {
  const uint32 low = element_low(pair) <= threshold ? 0 : 0xffffu;
  const uint32 high = element_high(pair) <= threshold ? 0 : 0xffff0000u;
  return activated(pair & (low | high));
}
