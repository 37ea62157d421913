// weight_grad: the weights' gradients of a sparse FFN, from columns in the order of group_columns and
// their values in the form of fill_pieces.
//
//   gate[n] = Σ d_gate · x[token]    up[n] = Σ d_up · x[token]    down[n] = Σ gate · up · dy[token]
//
// A work unit is 32 neurons × 512 columns of x or dy × some rows. It is a sum of rows as in down.cuh: the
// rows of x or dy take the place of weight rows, and the values of the group's neurons, of d_gate and of
// d_up, that of the 64 tokens. Slices of 512 columns come one after the other: a slice of all tokens fits
// into L2, and x as a whole does not (64 MB at 16384 × 2048).
//
// On real traces (16384 tokens, 16–44 fired neurons each) a group's rows are 0.46–0.63 of its
// (token, neuron) pairs; of groups of 16, 0.56–0.74; of 64, 0.33–0.50 at twice the products.
//
// Where a group of neurons is split, its parts' sums are stored in memory; the unit that finishes last
// adds them in the order of the parts, so that the result is deterministic.
#include "sm90/down.cuh"
#include "common/weight_sums.cuh"

namespace {
using Arguments = GradArguments<unit_columns>;

// Two warpgroups hold 64 rows × 512 columns, each 256 columns, in the fragments of wgmma (wgmma.cuh):
// rows 0–31 are the first matrix.
struct GradTile : Tile {
  static constexpr int columns = unit_columns, rows = 2, eights = 32, batch = 8;
  static __device__ __forceinline__ int index(int row, int eight) { return 4 * eight + 2 * row; }
  static __device__ __forceinline__ int row(int number) {
    return threadIdx.x / 32 % 2 * 16 + threadIdx.x % 32 / 4 + 8 * number;
  }
  static __device__ __forceinline__ int matrix() { return threadIdx.x / 64 % 2; }
  static __device__ __forceinline__ int first_column() { return thread() / 128 * 256; }
  static __device__ __forceinline__ int number(bool twice) {
    return twice ? thread() : thread() / 128 * 64 + threadIdx.x % 64;
  }
};

struct Rows {
  int values;  // of a row
  // A row of x is read for eleven groups of 176, its values for one (H200, 16384 × 2048 × 5632,
  // layer 1 of the pilot's trace: 0.319 for 0.341 ms).
  static constexpr bool rare = true;

  __device__ uint32 neuron(uint32 token) const { return token; }
  __device__ uint32 place(uint32, int row) const { return row * values; }
};

__device__ void produce(Shared& shared, const Arguments& a, int units) {
  PipelineState<stages> pipeline;
  const int values = a.row_values();
  const auto look_up = [&](int index) { return a.work[index % units]; };
  UnitIterator iterator(shared.queue, a.progress + next_unit, units * 2 * a.slices);
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
  UnitReader iterator(shared.queue);
  for (WorkUnit own; (own = iterator.next()).index >= 0;) {
    const int slice = own.index / units;
    const Unit unit = a.unit[own.index % units];
    if (own.b == 0) {
      if (!add) store_gradient<GradTile, add>(a, unit.group, slice, [](int) { return 0.0f; });
      continue;
    }
    if (add) prefetch_sums<GradTile>(a, unit.group, slice);
    sum_steps(shared, pipeline, (own.b + stage_entries - 1) / stage_entries, d);
    if (unit.parts == 1 ||
        add_parts<GradTile>(last, a, slice, unit.slot, unit.part, unit.parts, d))
      store_gradient<GradTile, add>(a, unit.group, slice, [&](int i) { return d[i]; });
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    weight_grad(const element* x_MK, const element* dy_MK, int k, int n, const uint32* order,
                const Unit* unit, const uint32* control, const uint2* work,
                const uint32* piece_x, const uint32* piece_dy, const element* piece_values,
                uint32* progress, float* sums, int gated, int is_float, int adds, void* gate_NK,
                void* up_NK, void* down_NK) {
  Shared& shared = begin<Shared>(producer_threads);
  const int slices = (k + unit_columns - 1) / unit_columns, units = control[total_units];
  const Arguments a{k,       n,        slices,       gated != 0, x_MK, dy_MK,
                    order,   unit,     work,         piece_x,    piece_dy,
                    piece_values, progress, sums,    is_float != 0, gate_NK, up_NK, down_NK};
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

extern "C" __device__ const uint32 weight_grad_threads = block_threads, weight_grad_columns = unit_columns,
                                   weight_grad_shared_bytes = shared_bytes;
