// quantise_rows: rows of elements as e4m3, each with the scale that makes its largest magnitude 448, the
// largest number of e4m3: to[i] = round(from[row_of[i]] / scale[i]). A row with NaN or infinity becomes
// NaN, as every product with it would be.
//
// A warp quantises a row: 2 bytes are read and 1 is written per number. Between its largest magnitude and
// the division a row of up to `kept` chunks stays in registers; a longer one is read again, from L1 or L2.
#include "common/element.cuh"

namespace {
constexpr int threads = 256, warps = threads / 32;
// A chunk is 8 numbers for each lane of a warp. A lane loads `kept` of them at once.
constexpr int kept = 8;
static_assert(warps * 32 == threads);
constexpr float largest = 448.0f, smallest_scale = 1e-12f;

// Two magnitudes of elements; as integers they are in order, and NaN is above infinity.
__device__ __forceinline__ uint32 larger_magnitudes(uint32 a, uint32 b) {
  return __vmaxu2(a, b & 0x7fff7fffu);
}

__device__ __forceinline__ uint32 pack_e4m3(float low, float high) {
  unsigned short pair = 0;
#if __CUDA_ARCH__ >= 890  // older GPUs have no e4m3, and are never asked for it
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ __forceinline__ uint32 quantise(uint32 first, uint32 second, float inverse) {
  return pack_e4m3(element_low(first) * inverse, element_high(first) * inverse) |
         pack_e4m3(element_low(second) * inverse, element_high(second) * inverse) << 16;
}

// The octets first, first + 32, …; zeros beyond the row's end.
__device__ __forceinline__ void load(uint4 (&octet)[kept], const uint4* source, int first,
                                     int octets) {
#pragma unroll
  for (int i = 0; i < kept; ++i)
    octet[i] = first + 32 * i < octets ? source[first + 32 * i] : uint4{};
}
}  // namespace

extern "C" __global__ void __launch_bounds__(threads)
    quantise_rows(const element* x_MK, const int* row_M, int m, int k, unsigned char* values_MK,
                  float* scale_M) {
  await_previous_kernel();
  const int row = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= m) return;
  const int octets = k / 8;
  const uint64 own = row_M == nullptr ? row : row_M[row];
  const uint4* source = reinterpret_cast<const uint4*>(x_MK + own * k);
  uint2* target = reinterpret_cast<uint2*>(values_MK + static_cast<uint64>(row) * k);
  uint4 octet[kept];
  uint32 most = 0;
  for (int first = lane; first < octets; first += 32 * kept) {
    load(octet, source, first, octets);
#pragma unroll
    for (int i = 0; i < kept; ++i)
      most = larger_magnitudes(
          larger_magnitudes(larger_magnitudes(larger_magnitudes(most, octet[i].x), octet[i].y),
                            octet[i].z), octet[i].w);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    most = __vmaxu2(most, __shfl_xor_sync(~0u, most, apart));
  most = max(most & 0xffffu, most >> 16);
  // element_low of infinity is infinity and of NaN NaN; either makes the row NaN.
  const float magnitude = element_low(most);
  const float scale = magnitude < 3.4e38f ? fmaxf(magnitude / largest, smallest_scale)
                                          : __uint_as_float(0x7fc00000u);
  const float inverse = 1.0f / scale;
  if (lane == 0) scale_M[row] = scale;
  for (int first = lane; first < octets; first += 32 * kept) {
    if (octets > 32 * kept) load(octet, source, first, octets);
#pragma unroll
    for (int i = 0; i < kept; ++i)
      if (first + 32 * i < octets)
        target[first + 32 * i] = make_uint2(quantise(octet[i].x, octet[i].y, inverse),
                                            quantise(octet[i].z, octet[i].w, inverse));
  }
}
