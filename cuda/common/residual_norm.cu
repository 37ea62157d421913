// residual_norm: h ← h + y (without y: h stays), and x = RMSNorm(h) · weight. A block computes a token.
//
// It rounds where transformers' Llama does: the sum, the normalised h, and its product with the weight.
#include "common/element.cuh"

namespace {
constexpr int num_threads = 256, vector = 8;  // elements in 16 bytes

struct Vector {
  uint32 pair[4];

  __device__ __forceinline__ static Vector load(const element* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
  }
  __device__ __forceinline__ void store(element* to) const {
    *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(num_threads)
    residual_norm(element* h_MK, const element* y_MK, const element* weight_K, uint32 k,
                  float epsilon, element* x_MK) {
  __shared__ float squares_of_warp[num_threads / 32];
  admit_next_kernel();
  await_previous_kernel();
  const uint64 row = static_cast<uint64>(blockIdx.x) * k;
  float squares = 0.0f;
  for (uint32 at = threadIdx.x * vector; at < k; at += num_threads * vector) {
    Vector h = Vector::load(h_MK + row + at);
    if (y_MK != nullptr) {
      const Vector y = Vector::load(y_MK + row + at);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        h.pair[i] = pack_elements(element_low(h.pair[i]) + element_low(y.pair[i]),
                                  element_high(h.pair[i]) + element_high(y.pair[i]));
      h.store(h_MK + row + at);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = element_low(h.pair[i]), high = element_high(h.pair[i]);
      squares += low * low + high * high;
    }
  }
  squares = add_warp(squares);
  if (threadIdx.x % 32 == 0) squares_of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < num_threads / 32; ++warp) squares += squares_of_warp[warp];
  const float times = rsqrtf(squares / static_cast<float>(k) + epsilon);
  for (uint32 at = threadIdx.x * vector; at < k; at += num_threads * vector) {
    const Vector h = Vector::load(h_MK + row + at), weight = Vector::load(weight_K + at);
    Vector x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x.pair[i] = multiply_elements(
          pack_elements(element_low(h.pair[i]) * times, element_high(h.pair[i]) * times),
          weight.pair[i]);
    x.store(x_MK + row + at);
  }
}
