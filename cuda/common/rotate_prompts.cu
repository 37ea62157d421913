// rotate_prompts: RoPE of the queries and keys of whole prompts, and the prompts' part of the KV cache.
// Queries are rotated in place; keys are rotated into the cache, and values copied. A block computes a
// token.
//
// It rounds where transformers' Llama does: both products of a rotation, and their sum.
#include "common/element.cuh"

namespace {
constexpr int num_threads = 256, vector = 8;  // elements in 16 bytes

struct Vector {
  uint32 pair[vector / 2];

  __device__ __forceinline__ static Vector load(const element* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
  }
  __device__ __forceinline__ void store(element* to) const {
    *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
  __device__ __forceinline__ Vector times(const Vector& other) const {
    Vector product;
#pragma unroll
    for (int i = 0; i < vector / 2; ++i) product.pair[i] = multiply_elements(pair[i], other.pair[i]);
    return product;
  }
  // The sum with `sign` times another one.
  __device__ __forceinline__ Vector plus(const Vector& other, float sign) const {
    Vector sum;
#pragma unroll
    for (int i = 0; i < vector / 2; ++i)
      sum.pair[i] = pack_elements(element_low(pair[i]) + sign * element_low(other.pair[i]),
                                  element_high(pair[i]) + sign * element_high(other.pair[i]));
    return sum;
  }
};

// Eight numbers of a head and the eight that are half a head after them; null `cos`: a copy.
__device__ __forceinline__ void rotate(const element* from, const element* cos, const element* sin,
                                       uint32 half, element* to) {
  const Vector lower = Vector::load(from), upper = Vector::load(from + half);
  if (cos == nullptr) {
    lower.store(to);
    upper.store(to + half);
    return;
  }
  const Vector turned_lower = upper.times(Vector::load(sin));
  const Vector turned_upper = lower.times(Vector::load(sin + half));
  lower.times(Vector::load(cos)).plus(turned_lower, -1.0f).store(to);
  upper.times(Vector::load(cos + half)).plus(turned_upper, 1.0f).store(to + half);
}
}  // namespace

// q, k and v: rows of tokens, so many elements apart. first_M: padding before each prompt; null: none.
// cos_PD null: nothing is rotated. head_size is a multiple of 16.
extern "C" __global__ void __launch_bounds__(num_threads)
    rotate_prompts(element* q, const element* k, const element* v, uint32 q_stride, uint32 k_stride,
                   uint32 v_stride, element* keys, element* values, const element* cos_PD,
                   const element* sin_PD, const int* first_M, uint32 tokens, uint32 heads,
                   uint32 kv_heads, uint32 head_size, uint32 capacity) {
  await_previous_kernel();
  const uint64 row = blockIdx.x;
  const uint32 sequence = blockIdx.x / tokens, slot = blockIdx.x % tokens;
  const int padding = first_M == nullptr ? 0 : first_M[sequence];
  const uint64 position = max(static_cast<int>(slot) - padding, 0);
  const uint32 half = head_size / 2, units = half / vector;  // of a head
  const bool rotates = cos_PD != nullptr;
  const uint32 num_units = (heads + 2 * kv_heads) * units;
  for (uint32 unit = rotates ? threadIdx.x : heads * units + threadIdx.x; unit < num_units;
       unit += num_threads) {
    const uint32 at = unit % units * vector;
    const element *cos = nullptr, *sin = nullptr;
    if (rotates && unit < (heads + kv_heads) * units) {
      cos = cos_PD + position * head_size + at;
      sin = sin_PD + position * head_size + at;
    }
    uint32 head = unit / units;
    if (head < heads) {
      element* query = q + row * q_stride + head * head_size + at;
      rotate(query, cos, sin, half, query);
      continue;
    }
    const bool is_key = head < heads + kv_heads;
    head -= is_key ? heads : heads + kv_heads;
    const uint64 line = (static_cast<uint64>(sequence) * kv_heads + head) * capacity + slot;
    const element* from = (is_key ? k + row * k_stride : v + row * v_stride) + head * head_size + at;
    rotate(from, cos, sin, half, (is_key ? keys : values) + line * head_size + at);
  }
}
