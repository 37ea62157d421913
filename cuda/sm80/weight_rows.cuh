// How weight_grad sums rows of x and dy on GPUs other than Hopper.
#pragma once
#include "common/weight_sums.cuh"

namespace {
// A warp holds 32 rows × 64 columns (ring.cuh): the first four warps have the first matrix.
struct GradTile : Tile {
  static constexpr int rows = 4, eights = 8, batch = 4;
  static __device__ __forceinline__ int index(int row, int eight) {
    return row / 2 * 32 + eight * 4 + row % 2 * 2;
  }
  static __device__ __forceinline__ int row(int number) {
    return number / 2 * 16 + number % 2 * 8 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int matrix() { return threadIdx.x / 128; }
  static __device__ __forceinline__ int first_column() { return threadIdx.x / 32 % 4 * 64; }
  static __device__ __forceinline__ int number(bool) { return threadIdx.x; }
};

static_assert(GradTile::rows * GradTile::eights * 2 * 32 == warp_rows * warp_columns);

// What is summed up for one unit: rows of x or dy, times the values of the group's neurons.
struct Rows {
  static constexpr int max_sources = 1;
  const uint32* token;
  const element *values, *rows;
  int row_values;  // from one row's values to the next one's

  __device__ int num_sources() const { return 1; }
  __device__ const uint32* members(int) const { return token; }
  __device__ uint32 neuron(uint32 token) const { return token; }
  __device__ const element* columns(int, int, int) const { return values; }
  __device__ uint32 place(uint32, int row) const { return row * row_values; }
  __device__ const element* weights(int) const { return rows; }
};

__device__ __forceinline__ Rows rows_of(const Arguments& a, int slice, uint32 first_row) {
  const int values = a.row_values();
  const bool of_x = a.of_x(slice);
  return {(of_x ? a.piece_x : a.piece_dy) + first_row,
          a.piece_values + static_cast<uint64>(first_row) * values +
              (of_x ? 0 : values - group_neurons),
          of_x ? a.x : a.dy, values};
}

template <bool add>
__device__ __forceinline__ void sum_units(Shared& shared, const Arguments& a, int units) {
  __shared__ bool last;
  const auto look_up = [&](int index) { return a.work[index % units]; };
  UnitIterator iterator(shared.unit, a.progress + next_unit, units * 2 * a.slices);
  for (WorkUnit own; (own = iterator.next(look_up)).index >= 0;) {
    const int slice = own.index / units, num_rows = own.b;
    if (add && num_rows == 0) continue;
    const Rows rows = rows_of(a, slice, own.a);
    Gather<Rows> from(rows, 0, 0, num_rows, a.k, a.first_column(slice));
    if (add) prefetch_sums<GradTile>(a, a.unit[own.index % units].group, slice);
    Sums d = {};
    const auto prefetch_next = [&](int left) { iterator.prefetch_next(left, look_up); };
    if (a.twice(slice))
      sum_rows<true>(shared, from, d, prefetch_next);
    else
      sum_rows<false>(shared, from, d, prefetch_next);
    const Unit unit = a.unit[own.index % units];  // not before: it would stay in registers
    if (num_rows == 0 || unit.parts == 1 || add_parts<GradTile>(last, a, slice, unit, d))
      store_gradient<GradTile, add>(a, unit.group, slice, [&](int i) { return Tile::at(d, i); });
  }
}

__device__ __forceinline__ void run(const Arguments& a, const uint32* control, bool adds) {
  Shared& shared = dynamic_shared<Shared>();
  await_previous_kernel();
  const int units = control[total_units];
  if (adds)
    sum_units<true>(shared, a, units);
  else
    sum_units<false>(shared, a, units);
}
}  // namespace
