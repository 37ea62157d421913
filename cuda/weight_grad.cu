// weight_grad: the weights' gradients of a sparse FFN, from columns in the order of group_columns and
// their values in the form of fill_pieces.
//
//   gate[n] = Σ d_gate · x[token]    up[n] = Σ d_up · x[token]    down[n] = Σ gate · up · dy[token]
//
// A work unit is 32 neurons × 512 columns of x or dy × some rows, which are gathered and summed as
// in down.cuh: a row stands for a member, its token for the neuron, and what stands for the tokens
// are the group's neurons, those of d_gate and of d_up. One of the warps makes the operand of these
// from the stage's non-zeros: read as it is, it would be a fifth of the traffic and drive x out of
// L2. Slices of 512 columns are worked off one after the other: all tokens' slice fits there, and x
// as a whole does not (64 MB at 16384 × 2048).
//
// On real traces (16384 tokens, 16–44 fired neurons each) a group's rows are 0.46–0.63 of its
// (token, neuron) pairs; of groups of 16, 0.56–0.74; of 64, 0.33–0.50 at twice the products.
//
// A group of neurons that is split leaves its parts' sums in memory; who comes last adds them up,
// in their order: the same bits every time.
#include "weight_sums.cuh"

namespace {
constexpr int expand_warps = 1;
static_assert(stage_entries == stage_rows, "");

struct Rows {
  static constexpr int row_warps = 4 - expand_warps;

  __device__ uint32 neuron(uint32 token) const { return token; }
  __device__ uint32 place(uint32, int) const { return 0; }
};

__device__ void gather(Shared& shared, const Arguments& a, int units) {
  RingPlace<stages> place;
  const auto look_up = [&](int index) {
    const Unit unit = a.unit[index % units];
    const int rows = min(unit.pieces * piece_rows, unit.rows - unit.first_row);
    return make_uint2(a.piece_first[index % units], rows);
  };
  UnitWalk walk(shared.queue, a.progress + next_unit, units * 2 * a.slices, look_up);
  for (WorkUnit unit; (unit = walk.next(look_up)).index >= 0;) {
    const int slice = unit.index / units;
    gather_source(shared, place, Rows{}, a.of_x(slice) ? a.x : a.dy, nullptr,
                  a.piece_token + static_cast<uint64>(unit.a) * piece_rows, unit.b,
                  a.first_column(slice), a.k);
  }
}

// The gradients of a non-zero to their places in a stage: row by row, 64 neurons each.
__device__ __forceinline__ void put(bf16* to, const Arguments& a, int slice, const Pair& pair) {
  const int row = pair.h_at >> 16 & 31, neuron = pair.h_at >> 21;
  const auto at = [&](int column) {
    return swizzled(row, column / 8) / 2 + column % 8;
  };
  if (!a.of_x(slice)) {
    to[at(neuron)] = pair.h_at;
  } else if (a.gated) {
    to[at(neuron)] = pair.d;
    to[at(group_neurons + neuron)] = pair.d >> 16;
  } else {
    to[at(neuron)] = pair.d >> 16;
  }
}

constexpr int burst = 8;  // a lane's non-zeros of a stage that are on their way at once

struct Burst {
  Pair pair[burst];
  const Pair* from;
  int count;

  __device__ __forceinline__ void load(const Arguments& a, uint64 stage) {
    from = a.pairs + first_pair(stage);
    count = num_pairs(stage);
#pragma unroll
    for (int i = 0; i < burst; ++i)
      if (lane() + 32 * i < count) pair[i] = from[lane() + 32 * i];
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
};

// Makes the operands; a stage's non-zeros are on their way while the one before is made.
__device__ void expand(Shared& shared, const Arguments& a, int units) {
  const int lane = Burst::lane();
  RingPlace<stages> place;
  const auto look_up = [](int) { return make_uint2(0, 0); };
  UnitWalk walk(shared.queue, nullptr, 0, look_up);
  for (WorkUnit unit; (unit = walk.next(look_up)).index >= 0;) {
    const int slice = unit.index / units, steps = (unit.b + stage_rows - 1) / stage_rows;
    const uint64* stage = a.stage + static_cast<uint64>(unit.a) * piece_stages;
    // Lane l has the l-th of 32 stages, and of the 32 after them.
    uint64 near = lane < steps ? stage[lane] : 0, far = lane + 32 < steps ? stage[lane + 32] : 0;
    Burst next;
    next.load(a, __shfl_sync(~0u, near, 0));
    for (int step = 0; step < steps; ++step, place.advance()) {
      const Burst own = next;
      if (step % 32 == 31) {
        near = far;
        far = step + 33 + lane < steps ? stage[step + 33 + lane] : 0;
      }
      next.load(a, step + 1 < steps ? __shfl_sync(~0u, near, (step + 1) % 32) : 0);
      barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
      bf16* const to = shared.h[place.stage];
#pragma unroll
      for (int i = 0; i < stage_rows / 4; ++i)
        reinterpret_cast<uint4*>(to)[lane + 32 * i] = make_uint4(0, 0, 0, 0);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < burst; ++i)
        if (lane + 32 * i < own.count) put(to, a, slice, own.pair[i]);
      for (int i = lane + 32 * burst; i < own.count; i += 32) put(to, a, slice, own.from[i]);
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.full[place.stage]);
    }
  }
}

__device__ void multiply(Shared& shared, const Arguments& a, int units) {
  __shared__ bool add_up;
  float d[128];
  RingPlace<stages> place;
  const auto look_up = [](int) { return make_uint2(0, 0); };
  UnitWalk walk(shared.queue, nullptr, 0, look_up);
  for (WorkUnit own; (own = walk.next(look_up)).index >= 0;) {
    const int slice = own.index / units;
    const Unit unit = a.unit[own.index % units];
    if (own.b == 0) {
      store_gradient(a, unit.group, slice, [](int) { return 0.0f; });
      continue;
    }
    sum_steps(shared, place, (own.b + stage_entries - 1) / stage_entries, d);
    if (unit.parts == 1 ||
        add_parts(add_up, a, slice, unit.slot, unit.part, unit.parts, d))
      store_gradient(a, unit.group, slice, [&](int i) { return d[i]; });
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    weight_grad(const bf16* x_MK, const bf16* dy_MK, int k, int n, const uint32* order,
                const Unit* unit, const uint32* control, const int* piece_first,
                const uint32* piece_token, const uint64* stage, const Pair* pairs,
                uint32* progress, float* sums, int gated, int as_float, void* gate_NK, void* up_NK,
                void* down_NK) {
  Shared& shared = begin(block_threads, 32 * Rows::row_warps + 1);
  const int slices = (k + unit_columns - 1) / unit_columns, units = control[total_units];
  const Arguments a{k,     n,           slices,      gated != 0, x_MK,     dy_MK,
                    order, unit,        piece_first, piece_token, stage,   pairs,
                    progress, sums,     as_float != 0, gate_NK,   up_NK,   down_NK};
  if (threadIdx.x < gather_threads) {
    registers_decrease<gather_registers>();
    if (threadIdx.x < 32 * Rows::row_warps)
      gather(shared, a, units);
    else
      expand(shared, a, units);
  } else {
    registers_increase<multiply_registers>();
    multiply(shared, a, units);
  }
}

extern "C" __device__ const uint32 weight_grad_shared_bytes = shared_bytes;
