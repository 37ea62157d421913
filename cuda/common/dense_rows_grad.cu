// dense_rows_grad: the backward pass of the rows in the dense backup, and of those that it had no room
// for (common/hybrid.cuh), by dense products (common/dense_rows.cuh says how); after the gradients of the
// ELL rows, to which it adds the weights'.
//
// A round goes through these phases: gate and up of rows that were not kept; ∇h = ∇y · W_downᵀ, + λ ·
// sign(h), and from it ∇up, ∇gate and h; then both ∇x = ∇up · W_up + ∇gate · W_gate, in parts if there are
// few rows, and the weights' gradients, sums over the round's rows, each element by one block; last the
// sums of the parts.
#include "common/dense_rows.cuh"

namespace {
// A round's matrices [room][n]: first gate and up, then their gradients; and h.
struct Scratch {
  element *gate, *up, *h;  // gate: null without one
};

struct Backup {
  const element *gate, *up;
  int rows;

  // A round is recomputed whole if some row of it was not kept.
  __device__ bool holds(const Round& round) const { return round.first + round.rows <= rows; }
};

__device__ void recompute(GemmShared& shared, const Sizes& size, const Weights& w,
                              const element* x, const Round& round, int tile, const Scratch& to) {
  activations(shared, size, w, x, round, tile,
              [&](int row, int, int neuron, uint32 gate, uint32 up) {
                if (row < 0 || neuron < 0) return;
                const uint64 at = static_cast<uint64>(row) * size.n + neuron;
                if (to.gate != nullptr) *reinterpret_cast<uint32*>(to.gate + at) = gate;
                *reinterpret_cast<uint32*>(to.up + at) = to.gate == nullptr ? gate : up;
              });
}

struct Gradients {
  float up, gate, h;
};

// The gradients of one non-zero, or of a zero.
__device__ __forceinline__ Gradients gradients_of(float sum, float gate, float up, float lambda,
                                                  bool gated) {
  if (!gated) return {up == 0.0f ? 0.0f : sum * slope(up) + lambda, 0.0f, up};
  const float h = element_low(pack_elements(gate * up, 0.0f));
  const float d_h = sum + (h == 0.0f ? 0.0f : copysignf(lambda, h));
  if (gate == 0.0f) return {0.0f, 0.0f, 0.0f};
  return {d_h * gate, d_h * up * slope(gate), h};
}

__device__ void grad_activations(GemmShared& shared, const Sizes& size, const element* w_down,
                                 const element* dy, const int* token, const Round& round, int tile,
                                 float lambda, const Backup& backup, const Scratch& scratch) {
  const int first_row = tile % round.blocks * gemm_tile;
  const int first_neuron = tile / round.blocks * gemm_tile;
  const Along rows(dy, size.k, [&](int line) -> const element* {
    const int row = first_row + line;
    if (row >= round.rows) return nullptr;
    const uint32 own = round.list[row];
    const uint64 from = token == nullptr ? own : token[own];
    return dy + from * size.k;
  });
  const Along weights(w_down, size.k, [&](int line) -> const element* {
    const int neuron = first_neuron + line;
    return neuron < size.n ? w_down + static_cast<uint64>(neuron) * size.k : nullptr;
  });
  GemmSums d = {};
  multiply<false, false>(shared, size.k, rows, weights, d);
  const bool gated = scratch.gate != nullptr, kept = backup.holds(round);
  each_pair(d, [&](int tile_row, int tile_column, float low, float high) {
    const int row = first_row + tile_row, neuron = first_neuron + tile_column;
    if (row >= round.rows || neuron >= size.n) return;
    const uint64 at = static_cast<uint64>(row) * size.n + neuron;
    const uint64 from = kept ? at + static_cast<uint64>(round.first) * size.n : at;
    const uint32 up = *reinterpret_cast<const uint32*>((kept ? backup.up : scratch.up) + from);
    uint32 gate = 0;
    if (gated) gate = *reinterpret_cast<const uint32*>((kept ? backup.gate : scratch.gate) + from);
    const Gradients a = gradients_of(low, element_low(gate), element_low(up), lambda, gated);
    const Gradients b = gradients_of(high, element_high(gate), element_high(up), lambda, gated);
    *reinterpret_cast<uint32*>(scratch.up + at) = pack_elements(a.up, b.up);
    if (gated) *reinterpret_cast<uint32*>(scratch.gate + at) = pack_elements(a.gate, b.gate);
    *reinterpret_cast<uint32*>(scratch.h + at) = pack_elements(a.h, b.h);
  });
}

__device__ __forceinline__ float2 load_pair(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}
__device__ __forceinline__ float2 load_pair(const element* from) {
  const uint32 pair = *reinterpret_cast<const uint32*>(from);
  return make_float2(element_low(pair), element_high(pair));
}
__device__ __forceinline__ void store_pair(float* to, float2 pair) {
  *reinterpret_cast<float2*>(to) = pair;
}
__device__ __forceinline__ void store_pair(element* to, float2 pair) {
  *reinterpret_cast<uint32*>(to) = pack_elements(pair.x, pair.y);
}

// Adds the sums over the round's rows to 128 neurons × 128 columns of a matrix.
template <typename Number>
__device__ __forceinline__ void add_to_matrix(const GemmSums& d, const Sizes& size, int first_neuron,
                                              int first_column, Number* matrix) {
  const auto held = [&](int row, int column) {
    return first_neuron + row < size.n && first_column + column < size.k;
  };
  const auto at = [&](int row, int column) {
    return matrix + static_cast<uint64>(first_neuron + row) * size.k + first_column + column;
  };
  add_each_pair(
      d,
      [&](int row, int column) {
        return held(row, column) ? load_pair(at(row, column)) : make_float2(0.0f, 0.0f);
      },
      [&](int row, int column, float2 sums) {
        if (held(row, column)) store_pair(at(row, column), sums);
      });
}

__device__ void grad_weights(GemmShared& shared, const Sizes& size, const element* values,
                             const element* rows, const int* token, const Round& round, int tile,
                             void* matrix, bool is_float) {
  const int neuron_tiles = (size.n + gemm_tile - 1) / gemm_tile;
  const int first_neuron = tile % neuron_tiles * gemm_tile;
  const int first_column = tile / neuron_tiles * gemm_tile;
  const Across neurons{values, nullptr, nullptr, round.rows, size.n, first_neuron};
  const Across inputs{rows, round.list, token, round.rows, size.k, first_column};
  GemmSums d = {};
  multiply<true, true>(shared, round.rows, neurons, inputs, d);
  if (is_float)
    add_to_matrix(d, size, first_neuron, first_column, static_cast<float*>(matrix));
  else
    add_to_matrix(d, size, first_neuron, first_column, static_cast<element*>(matrix));
}
}  // namespace

// A few registers more than two blocks per multiprocessor would allow.
extern "C" __global__ void __launch_bounds__(gemm_threads, 1)
    dense_rows_grad(const element* x_MK, const element* dy_MK, const element* first_NK,
                    const element* second_NK, const element* w_down_NK, const float* l1, int n, int k,
                    const int* token, const uint32* list, const uint32* counted, uint32* control,
                    int room, const element* gate, const element* up, int backup,
                    element* scratch_gate, element* scratch_up, element* scratch_h, float* partial,
                    element* dx_MK, int is_float, void* up_NK, void* gate_NK, void* down_NK) {
  GemmShared& shared = dynamic_shared<GemmShared>();
  await_previous_kernel();
  const uint32 count = counted[num_overflowed];
  if (count == 0) return;
  const bool gated = second_NK != nullptr;
  const Sizes size{n, k};
  const Weights w{first_NK, nullptr, second_NK, nullptr, 0.0f, false};
  const Scratch scratch{gated ? scratch_gate : nullptr, scratch_up, scratch_h};
  const Backup kept{gate, up, backup};
  const uint32 neurons = tile_width(gated), matrices = gated ? 3 : 2;
  const uint32 gate_tiles = (n + neurons - 1) / neurons;
  const uint32 neuron_tiles = (n + gemm_tile - 1) / gemm_tile;
  const uint32 column_tiles = (k + gemm_tile - 1) / gemm_tile;
  const uint32 weight_tiles = neuron_tiles * column_tiles;
  const bool one_round = count <= room;
  // Work of a full round; of the only one there may be more.
  const uint32 row_tiles = gate_tiles + neuron_tiles + column_tiles;  // of each block of rows
  const uint32 full = room / gemm_tile * row_tiles + matrices * weight_tiles;
  const uint32 whole = one_round ? ~0u : full;
  while (true) {
    const uint32 item = claim_item(shared, control + next_item), number = item / whole;
    if (number * room >= count) break;
    const Round round(list, count, room, number);
    const Split split(round.blocks * column_tiles, one_round);
    const auto store_dx = [&](int row, int column, float low, float high) {
      *reinterpret_cast<uint32*>(dx_MK + static_cast<uint64>(round.list[row]) * k + column) =
          pack_elements(low, high);
    };
    const RowsProduct grad_x{size, round, split, partial, store_dx};
    const uint32 blocks = round.blocks, begin = number * whole;
    const uint32 computed = begin + blocks * gate_tiles, graded = computed + blocks * neuron_tiles;
    const uint32 multiplied = graded + split.items(), weighed = multiplied + matrices * weight_tiles;
    const uint32 end = weighed + split.additions();
    if (item >= end) break;
    await_items(control + items_done, item < computed  ? begin
                                      : item < graded  ? computed
                                      : item < weighed ? graded
                                                       : weighed);
    if (item < computed) {
      if (!kept.holds(round))
        recompute(shared, size, w, x_MK, round, item - begin, scratch);
    } else if (item < graded) {
      grad_activations(shared, size, w_down_NK, dy_MK, token, round, item - computed, *l1,
                       kept, scratch);
    } else if (item < multiplied) {
      GemmSums d = {};
      for (int source = 0; source < (gated ? 2 : 1); ++source)  // up, gate
        grad_x.multiply_item(shared, item - graded, source == 0 ? scratch.up : scratch.gate,
                             source == 0 && gated ? second_NK : first_NK, d);
      grad_x.finish(item - graded, d);
    } else if (item < weighed) {
      const uint32 matrix = (item - multiplied) / weight_tiles;  // up, down, gate
      const bool is_down = matrix == 1;
      grad_weights(shared, size, is_down ? scratch.h : matrix == 0 ? scratch.up : scratch.gate,
                   is_down ? dy_MK : x_MK, is_down ? token : nullptr, round,
                   (item - multiplied) % weight_tiles,
                   is_down ? down_NK : matrix == 0 ? up_NK : gate_NK, is_float != 0);
    } else {
      grad_x.add(item - weighed);
    }
    finish_item(control + items_done);
  }
}
