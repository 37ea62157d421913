// Shared by the dense products of an FFN's forward and backward pass on listed rows
// (common/rows_gemm.cuh): the activations of 128 rows, and the iteration over sums.
//
// Rows are processed in rounds of as many as fit into scratch memory. `first` are the weights whose
// product decides which neurons fire, `second` the other ones, or null.
#pragma once
#include "common/activation.cuh"
#include "common/rows_gemm.cuh"
#include "common/twell.cuh"

namespace {
struct Weights {
  const element *first, *b_first, *second, *b_second;
  float threshold;
  bool relu_up;
};

struct Sizes {
  int n, k;
};

// A round's rows.
struct Round {
  const uint32* list;
  int first, rows, blocks;  // first: how many rows came in the rounds before

  __device__ Round(const uint32* all, uint32 count, uint32 room, uint32 number)
      : list(all + number * room),
        first(number * room),
        rows(min(room, count - number * room)),
        blocks((rows + gemm_tile - 1) / gemm_tile) {}
};

// Calls `use(row, column, sum, next column's sum)` with a warp's part of 128 × 128 sums.
template <typename Use>
__device__ __forceinline__ void each_pair(const GemmSums& d, const Use& use) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        use(warp_row() + 16 * i + lane / 4 + 8 * half, warp_column() + 8 * j + lane % 4 * 2,
            d[i][j][2 * half], d[i][j][2 * half + 1]);
}

// The matrix and neuron of a column of 128: of every 32, which are a warp's, 16 are of the first
// matrix; the others of the second, or 16 neurons more of the first.
struct Column {
  bool second;
  int neuron;
};
__device__ __forceinline__ Column column_of(int column, int first_neuron, bool gated) {
  const bool later = column % 32 >= 16;
  const int neuron = first_neuron + column / 32 * 16 + column % 16;
  return gated ? Column{later, neuron} : Column{false, neuron + (later ? 64 : 0)};
}
__device__ __forceinline__ int tile_width(bool gated) { return gated ? 64 : 128; }

// Gate and up of 128 rows × 64 neurons, or of 128 neurons without a gate: `keep(row, j, neuron, gate,
// up)` is called with pairs of neighbouring neurons, after the activation, the same ones for the same `j` of four;
// without a gate `up` is all ones. All lanes call it: `row` is -1 where there is no row, `neuron` where
// there is no neuron.
template <typename Keep>
__device__ __forceinline__ void activations(GemmShared& shared, const Sizes& size, const Weights& w,
                                            const element* x, const Round& round, int tile,
                                            const Keep& keep) {
  const bool gated = w.second != nullptr;
  const int first_row = tile % round.blocks * gemm_tile;
  const int first_neuron = tile / round.blocks * tile_width(gated);
  const Along rows(x, size.k, [&](int line) -> const element* {
    const int row = first_row + line;
    return row < round.rows ? x + static_cast<uint64>(round.list[row]) * size.k : nullptr;
  });
  const Along weights(w.first, size.k, [&](int line) -> const element* {
    const Column own = column_of(line, first_neuron, gated);
    if (own.neuron >= size.n) return nullptr;
    return (own.second ? w.second : w.first) + static_cast<uint64>(own.neuron) * size.k;
  });
  GemmSums d = {};
  multiply<false, false>(shared, size.k, rows, weights, d);

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row() + 16 * i + lane / 4 + 8 * half;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (gated && j >= 2) continue;
        const int neuron =
            column_of(warp_column() + 8 * j + lane % 4 * 2, first_neuron, gated).neuron;
        const bool there = row < round.rows && neuron < size.n;
        uint32 gate = 0, up = two_ones;
        if (there) {
          const float(&sums)[4] = d[i][j];
          gate = pack_biased(sums[2 * half], sums[2 * half + 1], w.b_first, neuron, size.n);
          gate = activate(gate, w.threshold);
          if (gated) {
            const float(&sums)[4] = d[i][(j + 2) % 4];
            up = pack_biased(sums[2 * half], sums[2 * half + 1], w.b_second, neuron, size.n);
            if (w.relu_up) up = relu_elements(up);
          }
        }
        keep(row < round.rows ? row : -1, j, neuron < size.n ? neuron : -1, gate, up);
      }
    }
  }
}
}  // namespace
