// What weight_grad works on and what becomes of its sums: two warpgroups hold 64 rows × 512 columns,
// each 256 columns, in the fragments of wgmma (wgmma.cuh). Of x, rows 0–31 are the sums of the group's
// neurons with d_gate and 32–63 those with d_up; without a gate, and of dy, there is one matrix, and
// rows 32–63 are nobody's.
#pragma once
#include "sm90/down.cuh"
#include "common/weight_grad.cuh"

namespace {
// How gradients leave, `output`; numbered alike in weight_grad.py.
constexpr int bf16_values = 0, fp32_values = 1, added_to_fp32 = 2;

struct Arguments {
  int k, n, slices;  // slices of x, and of dy
  bool gated;
  const bf16 *x, *dy;
  const uint32* order;
  const Unit* unit;
  const uint2* work;
  const uint32 *piece_x, *piece_dy;
  const bf16* piece_values;
  uint32* progress;
  float* sums;
  bool as_float;
  void *out_gate, *out_up, *out_down;

  __device__ int row_values() const { return (gated ? 3 : 2) * group_neurons; }
  __device__ bool of_x(int slice) const { return slice < slices; }
  // Two matrices of values at once: those of gate and up, which meet the same rows of x.
  __device__ bool twice(int slice) const { return gated && of_x(slice); }
  __device__ int first_column(int slice) const {
    return (of_x(slice) ? slice : slice - slices) * unit_columns;
  }
};

__device__ __forceinline__ int multiplier() { return threadIdx.x - gather_threads; }

// Which matrix of two this thread's sums are of: all of a warp's are of one.
__device__ __forceinline__ int matrix_of_warp() { return threadIdx.x / 64 % 2; }

// Where a thread keeps its sums of one part, and after how many of them the next ones lie.
struct Sums {
  float4* at;
  int stride;
};
__device__ __forceinline__ Sums sums_of(const Arguments& a, int slot, int slice) {
  constexpr uint64 one = group_neurons * unit_columns;
  const uint64 of_x = a.gated ? 2 * one : one, of_slot = a.slices * (of_x + one);
  const uint64 of_slice = slice * of_x - (a.of_x(slice) ? 0 : (slice - a.slices) * (of_x - one));
  const bool twice = a.twice(slice);
  const int thread = twice ? multiplier() : multiplier() / 128 * 64 + threadIdx.x % 64;
  return {reinterpret_cast<float4*>(a.sums + slot * of_slot + of_slice) + thread, twice ? 256 : 128};
}

// Leaves a part's sums in memory. True where all parts are there: then `d` are the sums of all.
__device__ __forceinline__ bool add_parts(bool& last, const Arguments& a, int slice, int slot,
                                          int part, int parts, float (&d)[128]) {
  const bool used = a.twice(slice) || matrix_of_warp() == 0;
  if (used) {
    const Sums own = sums_of(a, slot, slice);
    leave_sums(own.at, own.stride, d);
  }
  const int first = slot - part;
  if (!is_last_part(last, a.progress + arrived + first * 2 * a.slices + slice, parts)) return false;
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  if (!used) return true;
  for (int at = 0; at < parts; ++at) {
    const Sums from = sums_of(a, first + at, slice);
    add_sums(from.at, from.stride, d);
  }
  return true;
}

// At most 256 columns of one neuron's gradient, of which a lane has two of every eight; `half` says
// which elements of the fragments.
template <bool add, typename Sum>
__device__ __forceinline__ void store_row(float* row, int columns, Sum sum, int half) {
  constexpr int batch = 8;  // loads in flight: one after the other each would wait for L2
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int begin = 0; begin < 32; begin += batch) {
    float2 before[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = 8 * (begin + i) + first;
      before[i] = add && column < columns ? __ldcs(reinterpret_cast<float2*>(row + column))
                                          : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = 8 * (begin + i) + first, at = 4 * (begin + i) + 2 * half;
      const float2 own = make_float2(sum(at), sum(at + 1));
      if (column < columns)
        __stcs(reinterpret_cast<float2*>(row + column),
               add ? make_float2(before[i].x + own.x, before[i].y + own.y) : own);
    }
  }
}
template <bool, typename Sum>
__device__ __forceinline__ void store_row(bf16* row, int columns, Sum sum, int half) {
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    const uint4 octet = octet_of(sum, half, group, nullptr, 0, 0);
    const int column = 32 * group + 8 * (threadIdx.x % 4);
    if (column < columns) __stcs(reinterpret_cast<uint4*>(row + column), octet);
  }
}

// Where the gradients go of a slice's first or second matrix; where it has one, both are that.
__device__ __forceinline__ void* gradient_of(const Arguments& a, int slice, int matrix) {
  void* const up_or_down = a.of_x(slice) ? a.out_up : a.out_down;
  return a.twice(slice) && matrix == 0 ? a.out_gate : up_or_down;
}

template <typename Out, bool add, typename Sum>
__device__ __forceinline__ void store_as(const Arguments& a, int group, int slice, Sum sum) {
  void* const to = gradient_of(a, slice, matrix_of_warp());
  const int column = a.first_column(slice) + multiplier() / 128 * 256;
  const int first = group * group_neurons + threadIdx.x / 32 % 2 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = first + 8 * half;
    const uint64 neuron = place < a.n ? a.order[place] : 0;
    store_row<add>(static_cast<Out*>(to) + neuron * a.k + column,
                   place < a.n ? a.k - column : 0, sum, half);
  }
}

template <bool add, typename Sum>
__device__ __forceinline__ void store_gradient(const Arguments& a, int group, int slice, Sum sum) {
  if (!a.twice(slice) && matrix_of_warp() == 1) return;
  if (add || a.as_float)
    store_as<float, add>(a, group, slice, sum);
  else
    store_as<bf16, false>(a, group, slice, sum);
}

// Brings the sums that a unit adds to from memory to L2 while its rows are gathered.
__device__ __forceinline__ void prefetch_sums(const Arguments& a, int group, int slice) {
  constexpr int line = 128 / sizeof(float), lines = unit_columns / line;
  const int matrices = a.twice(slice) ? 2 : 1;
  for (int i = multiplier(); i < matrices * group_neurons * lines; i += 256) {
    const int column = a.first_column(slice) + i % lines * line;
    const int place = group * group_neurons + i / lines % group_neurons;
    if (column >= a.k || place >= a.n) continue;
    const float* const of = static_cast<float*>(gradient_of(a, slice, i / lines / group_neurons));
    prefetch_to_l2(of + static_cast<uint64>(a.order[place]) * a.k + column);
  }
}
}  // namespace
