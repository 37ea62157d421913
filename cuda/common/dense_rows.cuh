// Dense products with listed rows, those that a sparse format does not hold, for an FFN's forward and
// backward pass. They use mma.sync, since such rows are few, on every GPU since Ampere.
//
// A block of 256 threads computes 128 × 128 sums, 32 of the inner dimension per stage; a warp holds 64 ×
// 32 of them. Work items are numbered, in phases each of which needs the results of the previous one.
// A block claims the next item when it has finished one, and waits for all items of earlier phases:
// these were claimed earlier, by blocks that are running, so a deadlock is impossible.
//
// Rows are processed in rounds of as many as fit into scratch memory. A few rows are few tiles of a
// product with the long inner dimension n, which would leave most of the GPU idle: it is split into parts
// along n, each with its own sums, which the last phase adds up in order. `first` are the weights whose
// product decides which neurons are active, `second` the other ones, or null.
#pragma once
#include "common/activation.cuh"
#include "common/mma.cuh"
#include "common/tiles.cuh"
#include "common/twell.cuh"

namespace {
// --- the product ---------------------------------------------------------------------------------

using namespace dense_tiles;
constexpr int operand_bytes = gemm_tile * gemm_inner * 2;
static_assert(operand_bytes == 2 * 16 * gemm_threads, "a thread copies two chunks of each operand");
static_assert(gemm_tile / 64 * (gemm_tile / 32) * 32 == gemm_threads, "a warp has 64 × 32 sums");
static_assert(gemm_inner % 16 == 0, "of an mma");
static_assert(gemm_inner * 2 == 64 && gemm_tile * 2 == 256, "the rows that are swizzled");
static_assert(gemm_stages >= 2);

struct alignas(128) GemmShared {
  unsigned char a[gemm_stages][operand_bytes], b[gemm_stages][operand_bytes];
  uint32 item;
};

// Sums of a warp: [16 rows][8 columns][element of the fragment (common/mma.cuh)].
using GemmSums = float[4][4][4];

__device__ __forceinline__ int warp_row() { return threadIdx.x / 128 * 64; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % 4 * 32; }

// An operand lies either along the inner dimension, 128 lines of 32 values, or across it, 32 lines of
// 128. A thread copies 16 bytes of two lines in each stage: `at(i, step)` says from where, and
// `holds(i, step)` whether they are within the operand; outside of it there are zeros.
template <bool across>
__device__ __forceinline__ int own_line(int i) {
  return across ? threadIdx.x / 16 + 16 * i : threadIdx.x / 4 + 64 * i;
}
template <bool across>
__device__ __forceinline__ int own_chunk() {
  return threadIdx.x % (across ? 16 : 4);
}

template <bool across, typename Operand>
__device__ __forceinline__ void copy_operand(unsigned char* to, const Operand& operand, int step) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    copy16_async(smem_address(to) + swizzled<across ? 256 : 64>(own_line<across>(i), own_chunk<across>()),
                 operand.at(i, step), operand.holds(i, step) ? 16 : 0);
  }
}

template <bool a_across, bool b_across>
__device__ __forceinline__ void multiply_stage(const unsigned char* a, const unsigned char* b,
                                               GemmSums& d) {
  const int lane = threadIdx.x % 32, octet = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll 1
  for (int inner = 0; inner < gemm_inner; inner += 16) {
    uint32 of_b[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = warp_column() + 16 * j;
      if (b_across)
        load_matrices_transposed(of_b[j], smem_address(b) + swizzled<256>(inner + low * 8 + octet,
                                                                      column / 8 + high));
      else
        load_matrices(of_b[j], smem_address(b) + swizzled<64>(column + high * 8 + octet,
                                                          inner / 8 + low));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row() + 16 * i;
      uint32 of_a[4];
      if (a_across)
        load_matrices_transposed(of_a, smem_address(a) + swizzled<256>(inner + high * 8 + octet,
                                                                      row / 8 + low));
      else
        load_matrices(of_a, smem_address(a) + swizzled<64>(row + low * 8 + octet,
                                                          inner / 8 + high));
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(d[i][j], of_a, of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Adds the products over `length` of the inner dimension.
template <bool a_across, bool b_across, typename A, typename B>
__device__ __forceinline__ void multiply(GemmShared& shared, int length, const A& a, const B& b,
                                         GemmSums& d) {
  const int steps = (length + gemm_inner - 1) / gemm_inner;
  const auto copy = [&](int step) {
    if (step < steps) {
      copy_operand<a_across>(shared.a[step % gemm_stages], a, step);
      copy_operand<b_across>(shared.b[step % gemm_stages], b, step);
    }
    copy_commit();  // empty at the end, to keep the count
  };
#pragma unroll
  for (int step = 0; step < gemm_stages - 1; ++step) copy(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_wait<gemm_stages - 2>();
    // All threads' copies of this step have arrived, and the stage of the step before is free.
    __syncthreads();
    copy(step + gemm_stages - 1);
    multiply_stage<a_across, b_across>(shared.a[step % gemm_stages], shared.b[step % gemm_stages], d);
  }
  __syncthreads();  // the ring is free
}

// Lines along the inner dimension.
struct Along {
  const element* line[2];  // this thread's chunk of the first stage
  int left[2];          // values from there on; not positive: none

  // `line_of(line)`: where a line of the tile begins, or null.
  template <typename LineOf>
  __device__ __forceinline__ Along(const element* matrix, int length, const LineOf& line_of) {
    const int first = own_chunk<false>() * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const element* own = line_of(own_line<false>(i));
      line[i] = own == nullptr ? matrix : own + first;
      left[i] = own == nullptr ? 0 : length - first;
    }
  }
  __device__ __forceinline__ bool holds(int i, int step) const {
    return step * gemm_inner < left[i];
  }
  __device__ __forceinline__ const element* at(int i, int step) const {
    return line[i] + (holds(i, step) ? step * gemm_inner : 0);
  }
};

// Lines across: line `inner` of a row-major matrix, or the one that `list` names, or `token` of that,
// from `column` on.
struct Across {
  const element* matrix;
  const uint32* list;  // or null
  const int* token;    // or null
  int length, columns, column;

  __device__ __forceinline__ bool holds(int i, int step) const {
    return step * gemm_inner + own_line<true>(i) < length && column + own_chunk<true>() * 8 < columns;
  }
  __device__ __forceinline__ const element* at(int i, int step) const {
    if (!holds(i, step)) return matrix;
    const int inner = step * gemm_inner + own_line<true>(i);
    uint64 line = list == nullptr ? inner : list[inner];
    if (token != nullptr) line = token[line];
    return matrix + line * columns + column + own_chunk<true>() * 8;
  }
};

// Claims the next work item, for all threads.
__device__ __forceinline__ uint32 claim_item(GemmShared& shared, uint32* next) {
  if (threadIdx.x == 0) shared.item = claim_next(next);
  __syncthreads();
  const uint32 item = shared.item;
  __syncthreads();
  return item;
}

// Waits until so many items are finished, by any block.
__device__ __forceinline__ void await_items(const uint32* done, uint32 items) {
  if (threadIdx.x == 0)
    while (load_acquire(done) < items) pause();
  __syncthreads();
}

__device__ __forceinline__ void finish_item(uint32* done) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(done, 1);
}

// --- an FFN's products ---------------------------------------------------------------------------

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

// The same, with what is there already: `load(row, column)` gives two floats, `store(row, column, sums)` takes
// their sums. Eight loads are in flight before the first store, which a later load would have to wait for.
template <typename Load, typename Store>
__device__ __forceinline__ void add_each_pair(const GemmSums& d, const Load& load, const Store& store) {
  const int row = warp_row() + threadIdx.x % 32 / 4, column = warp_column() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 sums[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[half][j] = load(row + 16 * i + 8 * half, column + 8 * j);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[half][j].x += d[i][j][2 * half], sums[half][j].y += d[i][j][2 * half + 1];
        store(row + 16 * i + 8 * half, column + 8 * j, sums[half][j]);
      }
  }
}

// How a product with so many tiles, whose inner dimension is n, is divided into work items.
struct Split {
  int tiles, parts;

  // Only what is done in one round is split, so that all full rounds have equally many items.
  __device__ Split(int tiles, bool one_round)
      : tiles(tiles), parts(one_round ? max(1, min(max_parts, max_partial_tiles / tiles)) : 1) {}
  __device__ uint32 items() const { return tiles * parts; }
  __device__ uint32 additions() const { return parts == 1 ? 0 : tiles * (gemm_tile / added_rows); }
};

// The inner dimension of one part.
struct Inner {
  int first, length;

  __device__ Inner(const Split& split, int part, int n) {
    const int steps = (n + gemm_inner - 1) / gemm_inner;
    const int each = (steps + split.parts - 1) / split.parts * gemm_inner;
    first = min(part * each, n);
    length = min(each, n - first);
  }
};

// `partial` [items of a split product][128][128]: a warp's part of an item's sums.
__device__ __forceinline__ void store_part(float* partial, int item, const GemmSums& d) {
  float* to = partial + static_cast<uint64>(item) * gemm_tile * gemm_tile;
  each_pair(d, [&](int row, int column, float low, float high) {
    *reinterpret_cast<float2*>(to + row * gemm_tile + column) = make_float2(low, high);
  });
}

// Adds up the parts of a few rows of a tile: `use(tile, row, column, sum, next column's sum)`.
template <typename Use>
__device__ __forceinline__ void add_parts(const float* partial, const Split& split, int addition,
                                          const Use& use) {
  constexpr int pairs = gemm_tile / 2;
  const int tile = addition / (gemm_tile / added_rows);
  const int first_row = addition % (gemm_tile / added_rows) * added_rows;
  for (int i = threadIdx.x; i < added_rows * pairs; i += gemm_threads) {
    const int row = first_row + i / pairs, column = i % pairs * 2;
    float low = 0.0f, high = 0.0f;
    for (int part = 0; part < split.parts; ++part) {
      const uint64 item = static_cast<uint64>(part) * split.tiles + tile;
      const float2 own = __ldcg(
          reinterpret_cast<const float2*>(partial + (item * gemm_tile + row) * gemm_tile + column));
      low += own.x, high += own.y;
    }
    use(tile, row, column, low, high);
  }
}

// The product of a round's rows [rows][n] with weights [n][k]; tiles vary fastest, so that parts are stored
// tile by tile. `store(row of the round, column, sum, next column's sum)`.
template <typename Store>
struct RowsProduct {
  const Sizes& size;
  const Round& round;
  const Split& split;
  float* partial;
  Store store;

  // Adds `values` · `weights` to the sums of an item.
  __device__ __forceinline__ void multiply_item(GemmShared& shared, int item, const element* values,
                                                const element* weights, GemmSums& d) const {
    const int tile = item % split.tiles, first_row = tile % round.blocks * gemm_tile;
    const int first_column = tile / round.blocks * gemm_tile;
    const Inner inner(split, item / split.tiles, size.n);
    const Along rows(values, inner.length, [&](int line) -> const element* {
      const int row = first_row + line;
      return row < round.rows ? values + static_cast<uint64>(row) * size.n + inner.first : nullptr;
    });
    const Across columns{weights + static_cast<uint64>(inner.first) * size.k,
                         nullptr, nullptr, inner.length, size.k, first_column};
    multiply<false, true>(shared, inner.length, rows, columns, d);
  }

  // Stores the sums of an item: results, or a part of them.
  __device__ __forceinline__ void finish(int item, const GemmSums& d) const {
    if (split.parts > 1) {
      store_part(partial, item, d);
      return;
    }
    const int tile = item % split.tiles;
    each_pair(d, [&](int row, int column, float low, float high) {
      store_in(tile, row, column, low, high);
    });
  }

  __device__ __forceinline__ void add(int addition) const {
    add_parts(partial, split, addition, [&](int tile, int row, int column, float low, float high) {
      store_in(tile, row, column, low, high);
    });
  }

  __device__ __forceinline__ void store_in(int tile, int tile_row, int tile_column, float low,
                                           float high) const {
    const int row = tile % round.blocks * gemm_tile + tile_row;
    const int column = tile / round.blocks * gemm_tile + tile_column;
    if (row < round.rows && column < size.k) store(row, column, low, high);
  }
};
template <typename Store>
RowsProduct(const Sizes&, const Round&, const Split&, float*, Store) -> RowsProduct<Store>;

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

extern "C" __device__ const uint32 exported_shared_bytes = sizeof(GemmShared);
extern "C" __device__ const uint32 exported_partial_sums = max_partial_tiles * gemm_tile * gemm_tile;
