// The sums of weight_grad: eight warps hold 32 neurons × 512 columns of one matrix or of two, each
// warp 64 columns.
#pragma once
#include "mma.cuh"
#include "weight_grad.cuh"

namespace {
constexpr int multiply_warps = 8, copy_warps = 4;
constexpr int multiply_threads = 32 * multiply_warps;
constexpr int block_threads = multiply_threads + 32 * copy_warps;
constexpr int slice_columns = 512;

struct Arguments {
  int k, n, slices;  // slices of x, and of dy
  bool gated;
  const bf16 *x, *dy;
  const uint32* order;
  const Unit* unit;
  const uint32* control;
  const int* piece_first;
  const int* piece_token;
  const bf16* piece_values;
  uint32* progress;
  float* sums;
  bool as_float;
  void *out_gate, *out_up, *out_down;

  __device__ bool of_x(int slice) const { return slice < slices; }
  // Two matrices of values at once: those of gate and up, which meet the same rows of x.
  __device__ bool twice(int slice) const { return gated && of_x(slice); }
  __device__ int first_column(int slice) const {
    return (of_x(slice) ? slice : slice - slices) * slice_columns;
  }
};

// Sums of a warp: [16 neurons][8 columns][element of the fragment], of one matrix or of two.
template <bool twice>
struct Sums {
  static constexpr int tiles = twice ? 4 : 2;
  float d[tiles][8][4] = {};
};

// Where a thread keeps its sums of one part; the next 16 bytes lie a block of threads further.
__device__ __forceinline__ float4* sums_of(const Arguments& a, int slot, int slice) {
  constexpr uint64 one = group_neurons * slice_columns;
  const uint64 of_x = a.gated ? 2 * one : one, of_slot = a.slices * (of_x + one);
  const uint64 of_slice = slice * of_x - (a.of_x(slice) ? 0 : (slice - a.slices) * (of_x - one));
  return reinterpret_cast<float4*>(a.sums + slot * of_slot + of_slice) + threadIdx.x;
}

// Leaves a part's sums in memory. True where all parts are there: then `sums` are those of all.
template <bool twice>
__device__ __forceinline__ bool add_parts(bool& add_up, const Arguments& a, int slice, int slot,
                                          int part, int parts, Sums<twice>& sums) {
  float4* own = sums_of(a, slot, slice);
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float(&d)[4] = sums.d[i][j];
      __stcg(own + (i * 8 + j) * multiply_threads, make_float4(d[0], d[1], d[2], d[3]));
    }
  __threadfence();
  named_barrier(1, multiply_threads);
  const int first = slot - part;
  uint32* done = a.progress + arrived + first * 2 * a.slices + slice;
  if (threadIdx.x == 0) add_up = atomicAdd(done, 1) == parts - 1;
  named_barrier(1, multiply_threads);
  if (!add_up) return false;
  __threadfence();
  sums = {};
  for (int at = 0; at < parts; ++at) {
    const float4* from = sums_of(a, first + at, slice);
#pragma unroll
    for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 more = __ldcg(from + (i * 8 + j) * multiply_threads);
        sums.d[i][j][0] += more.x;
        sums.d[i][j][1] += more.y;
        sums.d[i][j][2] += more.z;
        sums.d[i][j][3] += more.w;
      }
  }
  return true;
}

// At most 64 columns of one neuron's gradient, of which a lane has two of every eight; `half` says
// which elements of the fragments.
template <typename Out>
__device__ __forceinline__ void store_row(Out* row, int columns, const float (&d)[8][4], int half);

template <>
__device__ __forceinline__ void store_row(float* row, int columns, const float (&d)[8][4],
                                          int half) {
  row += threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j * 8 < columns)
      *reinterpret_cast<float2*>(row + j * 8) = make_float2(d[j][2 * half], d[j][2 * half + 1]);
}

template <>
__device__ __forceinline__ void store_row(bf16* row, int columns, const float (&d)[8][4],
                                          int half) {
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    uint32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      word[j] = pack_bf16(d[first + j][2 * half], d[first + j][2 * half + 1]);
    transpose_quad(word);  // 8 columns a lane: 16-byte stores
    const int octet = first * 8 + threadIdx.x % 4 * 8;
    if (octet < columns)
      *reinterpret_cast<uint4*>(row + octet) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

template <bool twice, typename Out>
__device__ __forceinline__ void store_as(const Arguments& a, int slice, int own,
                                         const Sums<twice>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = a.first_column(slice) + warp * 64;
  Out* const up_or_down = static_cast<Out*>(a.of_x(slice) ? a.out_up : a.out_down) + column;
  Out* const gate = static_cast<Out*>(a.out_gate) + column;
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int neuron = __shfl_sync(~0u, own, i % 2 * 16 + half * 8 + lane / 4);
      Out* const out = twice && i < 2 ? gate : up_or_down;
      store_row(out + static_cast<uint64>(max(neuron, 0)) * a.k, neuron < 0 ? 0 : a.k - column,
                sums.d[i], half);
    }
}

// `own`: the lane's neuron of the group's 32; -1: none.
template <bool twice>
__device__ __forceinline__ void store(const Arguments& a, int slice, int own,
                                      const Sums<twice>& sums) {
  if (a.as_float)
    store_as<twice, float>(a, slice, own, sums);
  else
    store_as<twice, bf16>(a, slice, own, sums);
}
}  // namespace
