// The operands and the epilogue of the kernels for the weights' gradients, for every architecture
// (weight_rows.cuh of sm80 and sm90).
//
// A unit's sums are two matrices, 32 neurons of a group × `unit_columns`: of x the first is that of d_gate
// and the second that of d_up; without a gate, and for dy, only the first is used. A `Tile` defines
// which of them a thread holds, in addition to what row_sums.cuh requires:
//
//   rows, row(r)        the rows of its matrix that it has part of; which neuron the r-th is
//   eights, index(r, e) it has two neighbouring sums of that many eights of columns of each of its
//                       rows: where the first of the two is
//   matrix()            which of the two matrices: all of a warp's are of one
//   first_column()      in the unit, of its eights
//   batch               eights whose sums are fetched at a time, where they are added to
//   number(twice)       of the thread among those that have sums; of one matrix, or of two
#pragma once
#include "common/weight_grad.cuh"
#include "down.cuh"

struct Arguments {
  int k, n, slices;  // slices of x, and of dy
  bool gated;
  const element *x, *dy;
  const uint32* order;
  const Unit* unit;
  const uint2* work;
  const uint32 *piece_x, *piece_dy;
  const element* piece_values;
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

template <typename Tile>
__device__ __forceinline__ SumsPlace sums_of(const Arguments& a, int slot, int slice) {
  constexpr uint64 one = group_neurons * unit_columns;
  const uint64 of_x = a.gated ? 2 * one : one, of_slot = a.slices * (of_x + one);
  const uint64 of_slice = slice * of_x - (a.of_x(slice) ? 0 : (slice - a.slices) * (of_x - one));
  const bool twice = a.twice(slice);
  return {reinterpret_cast<float4*>(a.sums + slot * of_slot + of_slice) + Tile::number(twice),
          static_cast<int>((twice ? 2 : 1) * one / (4 * Tile::quads))};
}

// Stores a part's sums in memory. Returns true for the last part: then `d` holds the sums of all parts.
template <typename Tile>
__device__ __forceinline__ bool add_parts(bool& last, const Arguments& a, int slice,
                                          const Unit& unit, typename Tile::Values& d) {
  const bool used = a.twice(slice) || Tile::matrix() == 0;
  if (used) store_sums<Tile>(sums_of<Tile>(a, unit.slot, slice), d);
  const int first = unit.slot - unit.part;
  if (!is_last_part<Tile>(last, a.progress + arrived + first * 2 * a.slices + slice, unit.parts))
    return false;
#pragma unroll
  for (int i = 0; i < 4 * Tile::quads; ++i) Tile::at(d, i) = 0.0f;
  if (!used) return true;
  add_sums<Tile>(unit.parts, [&](int part) { return sums_of<Tile>(a, first + part, slice); }, d);
  return true;
}

// At most `eights` · 8 columns of one neuron's gradient, of which a lane has two of every eight;
// `sum(i)`: the lane's sums as `at` counts them.
template <typename Tile, bool add, typename Sum>
__device__ __forceinline__ void store_row(float* to, int columns, Sum sum, int row) {
  static_assert(2 * Tile::rows * Tile::eights == 4 * Tile::quads, "all sums of a thread");
  static_assert(Tile::eights % Tile::batch == 0);
  constexpr int batch = Tile::batch;  // one after the other each load would wait for L2
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int begin = 0; begin < Tile::eights; begin += batch) {
    float2 before[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = 8 * (begin + i) + first;
      before[i] = add && column < columns ? __ldcs(reinterpret_cast<float2*>(to + column))
                                          : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = 8 * (begin + i) + first, at = Tile::index(row, begin + i);
      const float2 own = make_float2(sum(at), sum(at + 1));
      if (column < columns)
        __stcs(reinterpret_cast<float2*>(to + column),
               add ? make_float2(before[i].x + own.x, before[i].y + own.y) : own);
    }
  }
}
template <typename Tile, bool, typename Sum>
__device__ __forceinline__ void store_row(element* to, int columns, Sum sum, int row) {
  static_assert(Tile::eights % 4 == 0, "a quad transposes four eights");
#pragma unroll
  for (int group = 0; group < Tile::eights / 4; ++group) {
    uint32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = Tile::index(row, 4 * group + j);
      word[j] = pack_elements(sum(at), sum(at + 1));
    }
    const uint4 octet = transpose_quad(word);  // eight columns a lane: 16-byte stores
    const int column = 32 * group + 8 * (threadIdx.x % 4);
    if (column < columns) __stcs(reinterpret_cast<uint4*>(to + column), octet);
  }
}

// Where the gradients of a slice's first or second matrix go; if it has only one, both are that one.
__device__ __forceinline__ void* gradient_of(const Arguments& a, int slice, int matrix) {
  void* const up_or_down = a.of_x(slice) ? a.out_up : a.out_down;
  return a.twice(slice) && matrix == 0 ? a.out_gate : up_or_down;
}

template <typename Tile, typename Out, bool add, typename Sum>
__device__ __forceinline__ void store_as(const Arguments& a, int group, int slice, Sum sum) {
  void* const to = gradient_of(a, slice, Tile::matrix());
  const int column = a.first_column(slice) + Tile::first_column();
#pragma unroll
  for (int row = 0; row < Tile::rows; ++row) {
    const int place = group * group_neurons + Tile::row(row);
    const uint64 neuron = place < a.n ? a.order[place] : 0;
    store_row<Tile, add>(static_cast<Out*>(to) + neuron * a.k + column,
                         place < a.n ? a.k - column : 0, sum, row);
  }
}

template <typename Tile, bool add, typename Sum>
__device__ __forceinline__ void store_gradient(const Arguments& a, int group, int slice, Sum sum) {
  if (!a.twice(slice) && Tile::matrix() == 1) return;
  if (add || a.as_float)
    store_as<Tile, float, add>(a, group, slice, sum);
  else
    store_as<Tile, element, false>(a, group, slice, sum);
}

// Prefetches the sums that a unit adds to into L2 while its rows are gathered.
template <typename Tile>
__device__ __forceinline__ void prefetch_sums(const Arguments& a, int group, int slice) {
  constexpr int line = 128 / sizeof(float), lines = unit_columns / line;
  static_assert(unit_columns % line == 0);
  const int matrices = a.twice(slice) ? 2 : 1;
  for (int i = Tile::thread(); i < matrices * group_neurons * lines; i += Tile::threads) {
    const int column = a.first_column(slice) + i % lines * line;
    const int place = group * group_neurons + i / lines % group_neurons;
    if (column >= a.k || place >= a.n) continue;
    const float* const of = static_cast<float*>(gradient_of(a, slice, i / lines / group_neurons));
    prefetch_to_l2(of + static_cast<uint64>(a.order[place]) * a.k + column);
  }
}
