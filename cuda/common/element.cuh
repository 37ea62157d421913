// The type of tokens, weights and activations, and all that depends on which it is: bf16, or with
// SPARSELLM_FP16 fp16, which inference takes too. Sums are fp32 either way; what is too large for an
// fp16 number becomes infinite when it is rounded, as in a dense model of that type.
#pragma once
#include "common/ptx.cuh"

using element = unsigned short;  // the bits; NVRTC needs no header for them

// Its name in PTX, and a pair of ones.
#ifdef SPARSELLM_FP16
#define ELEMENT "f16"
constexpr uint32 two_ones = 0x3c003c00u;
#else
#define ELEMENT "bf16"
constexpr uint32 two_ones = 0x3f803f80u;
#endif

// Two fp32 → a pair, round to nearest even; `low` in the low half.
__device__ __forceinline__ uint32 pack_elements(float low, float high) {
  uint32 pair;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The same of their positive parts; NaN stays NaN.
__device__ __forceinline__ uint32 pack_elements_relu(float low, float high) {
  uint32 pair;
  asm("cvt.rn.relu." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// max(value, 0) of two; NaN passes.
__device__ __forceinline__ uint32 relu_elements(uint32 pair) {
  asm("max.NaN." ELEMENT "x2 %0, %0, %1;" : "+r"(pair) : "r"(0u));
  return pair;
}

// One half of a pair, or an element alone.
#ifdef SPARSELLM_FP16
__device__ __forceinline__ float element_low(uint32 pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(value)
      : "r"(pair));
  return value;
}
__device__ __forceinline__ float element_high(uint32 pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
      : "=f"(value)
      : "r"(pair));
  return value;
}
#else
__device__ __forceinline__ float element_low(uint32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float element_high(uint32 pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
#endif

__device__ __forceinline__ uint32 multiply_elements(uint32 a, uint32 b) {
  return pack_elements(element_low(a) * element_low(b), element_high(a) * element_high(b));
}

// Adds a bias to the sums of columns `at` and the next; a null pointer adds nothing.
__device__ __forceinline__ uint32 pack_biased(float low, float high, const element* bias, int at,
                                              int columns) {
  if (bias != nullptr && at < columns) {
    const uint32 pair = *reinterpret_cast<const uint32*>(bias + at);
    low += element_low(pair);
    high += element_high(pair);
  }
  return pack_elements(low, high);
}

// Where the tokens are: rows of a matrix, and its map for TMA, which is used only if `row_of`, the row
// of each token, is null.
struct Tokens {
  const TensorMap& map;
  const element* x;
  const int* row_of;
  int m;
};
