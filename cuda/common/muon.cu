// The two passes of Muon's step over all numbers of its matrices: advance_momenta before the products,
// add_updates after them. A launch takes matrices of one size, and gets their addresses by value: there is
// no list of them in memory that the host would have to fill.
//
// Memory bounds both. A thread loads all of its numbers before it uses the first, or the flag.
// Arithmetic is PyTorch's (lerp as nvcc compiles it, with one rounding of product and sum; mul, then add),
// and keeps subnormal numbers, as PyTorch does: hence instructions instead of operators, which -ftz=true
// changes.
#include "common/element.cuh"

namespace {
constexpr int threads = 256, quads = 4;         // of four numbers, for a thread
constexpr uint64 numbers = 4 * threads * quads;  // for a block
constexpr int matrices = 64;                     // of a launch

struct Addresses {
  uint64 of[matrices];

  template <typename T>
  __device__ __forceinline__ T* at(uint32 matrix) const {
    return reinterpret_cast<T*>(of[matrix]);
  }
};

struct Quad {
  float number[4];
};

__device__ __forceinline__ float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

__device__ __forceinline__ float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

__device__ __forceinline__ float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

// torch.lerp: exact at both ends.
__device__ __forceinline__ float interpolate(float from, float to, float weight) {
  const bool is_small = fabsf(weight) < 0.5f;  // the same for all numbers
  return multiply_add(subtract(to, from), is_small ? weight : subtract(weight, 1.0f),
                      is_small ? from : to);
}

// Whether four numbers can be loaded at once.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T* address) {
  return reinterpret_cast<uint64>(address) % (4 * sizeof(T)) == 0;
}

// Four numbers, of which the first `left` exist; if they are aligned, all or none.
template <bool aligned>
__device__ __forceinline__ Quad load(const float* from, int64 left) {
  Quad quad{};
  if constexpr (aligned) {
    if (left <= 0) return quad;
    const float4 four = *reinterpret_cast<const float4*>(from);
    return {{four.x, four.y, four.z, four.w}};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) quad.number[i] = from[i];
  return quad;
}

template <bool aligned>
__device__ __forceinline__ Quad load(const element* from, int64 left) {
  Quad quad{};
  if constexpr (aligned) {
    if (left <= 0) return quad;
    const uint2 four = *reinterpret_cast<const uint2*>(from);
    return {{element_low(four.x), element_high(four.x), element_low(four.y), element_high(four.y)}};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) quad.number[i] = element_low(from[i]);
  return quad;
}

template <bool aligned>
__device__ __forceinline__ void store(float* to, int64 left, const Quad& quad) {
  const float(&number)[4] = quad.number;
  if constexpr (aligned) {
    if (left > 0)
      *reinterpret_cast<float4*>(to) = make_float4(number[0], number[1], number[2], number[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) to[i] = number[i];
}

template <bool aligned>
__device__ __forceinline__ void store(element* to, int64 left, const Quad& quad) {
  const float(&number)[4] = quad.number;
  const uint32 pair[2] = {pack_elements(number[0], number[1]), pack_elements(number[2], number[3])};
  if constexpr (aligned) {
    if (left > 0) *reinterpret_cast<uint2*>(to) = make_uint2(pair[0], pair[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) to[i] = static_cast<element>(pair[i / 2] >> 16 * (i % 2));
}

// Which numbers a thread has: quad i begins at number at(i) of the matrix.
struct Place {
  uint32 matrix;
  int64 first, n;

  __device__ __forceinline__ explicit Place(int64 n) : n(n) {
    const uint32 blocks = static_cast<uint32>((n + numbers - 1) / numbers);  // of a matrix
    matrix = blockIdx.x / blocks;
    first = static_cast<int64>(blockIdx.x % blocks) * numbers + 4 * threadIdx.x;
  }
  __device__ __forceinline__ int64 at(int quad) const { return first + quad * 4 * threads; }
  __device__ __forceinline__ int64 left(int quad) const { return n - at(quad); }
};

template <bool aligned>
__device__ __forceinline__ void advance(const Place& place, float* momentum, const float* gradient,
                                        element* direction, float rate, float ahead,
                                        const unsigned char* refused) {
  Quad before[quads], towards[quads];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    before[i] = load<aligned>(momentum + place.at(i), place.left(i));
    towards[i] = load<aligned>(gradient + place.at(i), place.left(i));
  }
  const bool stays = *refused != 0;
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    Quad after, way;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // A refused gradient may be NaN. A momentum is its own direction then.
      const float to = stays ? before[i].number[j] : towards[i].number[j];
      after.number[j] = interpolate(before[i].number[j], to, rate);
      way.number[j] = interpolate(to, after.number[j], ahead);
    }
    if (!stays) store<aligned>(momentum + place.at(i), place.left(i), after);
    if (direction != nullptr) store<aligned>(direction + place.at(i), place.left(i), way);
  }
}

template <bool aligned>
__device__ __forceinline__ void update(const Place& place, float* weight, const element* change,
                                       float decay, float factor, const unsigned char* refused) {
  Quad before[quads], by[quads];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    before[i] = load<aligned>(weight + place.at(i), place.left(i));
    by[i] = load<aligned>(change + place.at(i), place.left(i));
  }
  if (*refused != 0) return;
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    Quad after;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      after.number[j] =
          add(multiply(before[i].number[j], decay), multiply(by[i].number[j], factor));
    store<aligned>(weight + place.at(i), place.left(i), after);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_matrices = matrices;
extern "C" __device__ const uint32 exported_numbers = numbers;

// momentum ← lerp(momentum, gradient, rate), and direction = lerp(gradient, momentum, ahead), of n numbers
// each. A matrix without a direction has the address 0. If the step is refused, momenta stay.
extern "C" __global__ void __launch_bounds__(threads)
    advance_momenta(const __grid_constant__ Addresses momenta,
                    const __grid_constant__ Addresses gradients,
                    const __grid_constant__ Addresses directions, uint64 n, float rate, float ahead,
                    const unsigned char* refused) {
  await_previous_kernel();
  const Place place(n);
  float* momentum = momenta.at<float>(place.matrix);
  const float* gradient = gradients.at<const float>(place.matrix);
  element* direction = directions.at<element>(place.matrix);
  if (n % 4 == 0 && is_aligned(momentum) && is_aligned(gradient) && is_aligned(direction))
    advance<true>(place, momentum, gradient, direction, rate, ahead, refused);
  else
    advance<false>(place, momentum, gradient, direction, rate, ahead, refused);
}

// weight ← weight · decay + update · factor, of n numbers each. If the step is refused, weights stay.
extern "C" __global__ void __launch_bounds__(threads)
    add_updates(const __grid_constant__ Addresses weights,
                const __grid_constant__ Addresses updates, uint64 n, float decay, float factor,
                const unsigned char* refused) {
  await_previous_kernel();
  const Place place(n);
  float* weight = weights.at<float>(place.matrix);
  const element* change = updates.at<const element>(place.matrix);
  if (n % 4 == 0 && is_aligned(weight) && is_aligned(change))
    update<true>(place, weight, change, decay, factor, refused);
  else
    update<false>(place, weight, change, decay, factor, refused);
}
