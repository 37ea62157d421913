// dense_rows: the FFN of the rows that a sparse format does not hold, by dense products; launched with
// every call, and over at once where there are none (common/rows_gemm.cuh has how).
//
// Rows are worked off in rounds of as many as `h` has room for: first their activations, 128 rows × 64
// neurons of gate and up at a time (128 neurons without a gate), then their product with W_downᵀ.
// `first` are the weights whose product decides what fires, `second` the other ones, or null.
#include "common/rows_gemm.cuh"
#include "common/twell.cuh"

namespace {
struct Weights {
  const bf16 *first, *b_first, *second, *b_second;
  float threshold;
  bool relu_up;
};

struct Sizes {
  int n, k;
};

// A round's rows.
struct Round {
  const uint32* list;
  int rows, blocks;
};

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

__device__ __forceinline__ float add_bias(float sum, const bf16* bias, int neuron) {
  return bias == nullptr ? sum : sum + bf16_low(bias[neuron]);
}

__device__ __forceinline__ uint32 multiply_pairs(uint32 a, uint32 b) {
  return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
}

__device__ void activations(GemmShared& shared, const Sizes& size, const Weights& w, const bf16* x,
                            const Round& round, int tile, bf16* h) {
  const bool gated = w.second != nullptr;
  const int first_row = tile % round.blocks * gemm_tile;
  const int first_neuron = tile / round.blocks * (gated ? 64 : 128);
  const Along rows(x, size.k, [&](int line) -> const bf16* {
    const int row = first_row + line;
    return row < round.rows ? x + static_cast<uint64>(round.list[row]) * size.k : nullptr;
  });
  const Along weights(w.first, size.k, [&](int line) -> const bf16* {
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
      if (row >= round.rows) continue;
      bf16* out = h + static_cast<uint64>(row) * size.n;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Column own = column_of(warp_column() + 8 * j + lane % 4 * 2, first_neuron, gated);
        if (own.second || own.neuron >= size.n) continue;
        uint32 pair =
            cut_pair(pack_bf16(add_bias(d[i][j][2 * half], w.b_first, own.neuron),
                               add_bias(d[i][j][2 * half + 1], w.b_first, own.neuron + 1)),
                     w.threshold);
        if (gated) {
          const uint32 up =
              pack_bf16(add_bias(d[i][(j + 2) % 4][2 * half], w.b_second, own.neuron),
                        add_bias(d[i][(j + 2) % 4][2 * half + 1], w.b_second, own.neuron + 1));
          pair = multiply_pairs(pair, w.relu_up ? relu_bf16(up) : up);
        }
        *reinterpret_cast<uint32*>(out + own.neuron) = pair;
      }
    }
  }
}

__device__ void down(GemmShared& shared, const Sizes& size, const bf16* w, const bf16* bias,
                     const Round& round, int tile, const bf16* h, bf16* y) {
  const int first_row = tile % round.blocks * gemm_tile;
  const int first_column = tile / round.blocks * gemm_tile;
  const Along rows(h, size.n, [&](int line) -> const bf16* {
    const int row = first_row + line;
    return row < round.rows ? h + static_cast<uint64>(row) * size.n : nullptr;
  });
  const Across weights{w, nullptr, size.n, size.k, first_column};
  GemmSums d = {};
  multiply<false, true>(shared, size.n, rows, weights, d);

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row() + 16 * i + lane / 4 + 8 * half;
      if (row >= round.rows) continue;
      bf16* out = y + static_cast<uint64>(round.list[row]) * size.k;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = first_column + warp_column() + 8 * j + lane % 4 * 2;
        if (column >= size.k) continue;
        *reinterpret_cast<uint32*>(out + column) =
            pack_biased(d[i][j][2 * half], d[i][j][2 * half + 1], bias, column, size.k);
      }
    }
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(gemm_threads, 2)
    dense_rows(const bf16* x_MK, const bf16* first_NK, const bf16* b_first_N, const bf16* second_NK,
               const bf16* b_second_N, const bf16* down_NK, const bf16* b_down_K, float threshold,
               int relu_up, int n, int k, const uint32* list, uint32* control, int room, bf16* h,
               bf16* y_MK) {
  extern __shared__ __align__(128) unsigned char raw[];
  GemmShared& shared = *reinterpret_cast<GemmShared*>(raw);
  await_previous_kernel();
  const Sizes size{n, k};
  const Weights w{first_NK, b_first_N, second_NK, b_second_N, threshold, relu_up != 0};
  const uint32 count = control[num_overflowed];
  const uint32 neurons = second_NK == nullptr ? 128 : 64;
  const uint32 first_tiles = (n + neurons - 1) / neurons;
  const uint32 second_tiles = (k + gemm_tile - 1) / gemm_tile;
  const uint32 whole = room / gemm_tile * (first_tiles + second_tiles);  // work of a full round
  while (count > 0) {
    const uint32 item = take_item(shared, control + next_item), number = item / whole;
    if (number * room >= count) break;
    const int rows = min(static_cast<uint32>(room), count - number * room);
    const Round round{list + number * room, rows, (rows + gemm_tile - 1) / gemm_tile};
    const uint32 before = number * whole, activated = before + round.blocks * first_tiles;
    if (item >= activated + round.blocks * second_tiles) break;
    await_items(control + items_done, item < activated ? before : activated);
    if (item < activated)
      activations(shared, size, w, x_MK, round, item - before, h);
    else
      down(shared, size, down_NK, b_down_K, round, item - activated, h, y_MK);
    finish_item(control + items_done);
  }
}

extern "C" __device__ const uint32 dense_rows_shared_bytes = sizeof(GemmShared);
