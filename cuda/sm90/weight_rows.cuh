// How weight_grad sums rows of x and dy on Hopper.
#pragma once
#include "common/weight_sums.cuh"

namespace {
// Two warpgroups hold 64 rows × 512 columns, each 256 columns, in the fragments of wgmma (wgmma.cuh):
// rows 0–31 are the first matrix.
struct GradTile : Tile {
  static constexpr int rows = 2, eights = 32, batch = 8;
  static __device__ __forceinline__ int index(int row, int eight) { return 4 * eight + 2 * row; }
  static __device__ __forceinline__ int row(int number) {
    return threadIdx.x / 32 % 2 * 16 + threadIdx.x % 32 / 4 + 8 * number;
  }
  static __device__ __forceinline__ int matrix() { return threadIdx.x / 64 % 2; }
  static __device__ __forceinline__ int first_column() { return thread() / warpgroup_threads * 256; }
  static __device__ __forceinline__ int number(bool twice) {
    return twice ? thread() : thread() / warpgroup_threads * 64 + threadIdx.x % 64;
  }
};

static_assert(GradTile::rows * GradTile::eights * 2 * consumer_threads == block_tokens * unit_columns);

struct Rows {
  int values;  // of a row
  // A row of x is read for eleven groups of 176, its values for one (H200, 16384 × 2048 × 5632,
  // layer 1 of the pilot's trace: 0.319 instead of 0.341 ms).
  static constexpr bool rare = true;

  __device__ uint32 neuron(uint32 token) const { return token; }
  __device__ uint32 place(uint32, int row) const { return row * values; }
};

__device__ void produce(Shared& shared, const Arguments& a, int units) {
  PipelineState<stages> pipeline;
  const int values = a.row_values();
  const auto look_up = [&](int index) { return a.work[index % units]; };
  UnitIterator iterator{{shared.queue}, {a.progress + next_unit, units * 2 * a.slices}};
  for (WorkUnit unit; (unit = iterator.next(look_up)).index >= 0;) {
    const int slice = unit.index / units;
    const bool of_x = a.of_x(slice);
    const element* from = a.piece_values + static_cast<uint64>(unit.a) * values +
                       (of_x ? 0 : values - group_neurons);
    gather_source(shared, pipeline, Rows{values}, of_x ? a.x : a.dy, from,
                  (of_x ? a.piece_x : a.piece_dy) + unit.a, unit.b, a.first_column(slice), a.k,
                  [&](int left) { iterator.prefetch_next(left, look_up); });
  }
}

template <bool add>
__device__ void consume(Shared& shared, const Arguments& a, int units) {
  __shared__ bool last;
  float d[128];
  PipelineState<stages> pipeline;
  UnitReader iterator{shared.queue};
  for (WorkUnit own; (own = iterator.next()).index >= 0;) {
    const int slice = own.index / units;
    const Unit unit = a.unit[own.index % units];
    if (own.b == 0) {
      if (!add) store_gradient<GradTile, add>(a, unit.group, slice, [](int) { return 0.0f; });
      continue;
    }
    if (add) prefetch_sums<GradTile>(a, unit.group, slice);
    sum_steps(shared, pipeline, (own.b + stage_entries - 1) / stage_entries, d);
    if (unit.parts == 1 || add_parts<GradTile>(last, a, slice, unit, d))
      store_gradient<GradTile, add>(a, unit.group, slice, [&](int i) { return d[i]; });
  }
}

__device__ __forceinline__ void run(const Arguments& a, const uint32* control, bool adds) {
  Shared& shared = begin<Shared>(producer_threads);
  const int units = control[total_units];
  if (threadIdx.x < producer_threads) {
    registers_decrease<producer_registers>();
    produce(shared, a, units);
  } else {
    registers_increase<consumer_registers>();
    if (adds)
      consume<true>(shared, a, units);
    else
      consume<false>(shared, a, units);
  }
}
}  // namespace
