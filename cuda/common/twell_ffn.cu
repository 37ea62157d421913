// twell_up, twell_down: y = (gate * (x · W_upᵀ + b)) · W + b from a gate in TwELL (common/twell.cuh), W
// neuron by neuron: W_downᵀ as `nn.Linear` stores it. Neither x · W_upᵀ nor the product with the gate is
// ever dense in memory (common/walk.cuh says how). Without W_up the gate is h, and only twell_down runs;
// with `relu_up` up is relu'd too.
//
// A block of threads computes `rows_each` rows. Rows that overflowed TwELL, or with more non-zeros than
// a list holds, are listed in `overflowed` and left to dense_rows.
#include "common/block_sums.cuh"
#include "common/twell.cuh"
#include "common/walk.cuh"

namespace {
struct Shared {
  List list;
  uint32 nonzeros[max_rows];  // of each row; plus `not_held` for each tile that overflowed
  uint32 sum[walk_warps];
};

struct Twell {
  uint32* word;  // of this block's first row
  int tiles, rows;
};

// Counts the rows' non-zeros.
__device__ __forceinline__ void count_rows(Shared& shared, const Twell& twell) {
  if (threadIdx.x < max_rows) shared.nonzeros[threadIdx.x] = 0;
  __syncthreads();
  for (int item = threadIdx.x; item < twell.rows * twell.tiles; item += walk_threads) {
    const uint32 count = twell.word[static_cast<uint64>(item) * twell_width];
    if (count > 0)
      atomicAdd(shared.nonzeros + item / twell.tiles, count + (count < twell_width ? 0 : not_held));
  }
  __syncthreads();
}

// Calls `use` with each tile of the rows from `first` to `end` that has entries in the list: its words,
// the first four of them, and where its entries are.
template <typename Use>
__device__ __forceinline__ void each_tile(Shared& shared, const Twell& twell, int first, int end,
                                          const Use& use) {
  uint32 before = 0;
  for (int base = first * twell.tiles; base < end * twell.tiles; base += walk_threads) {
    const int item = base + threadIdx.x;
    uint32* words = twell.word + static_cast<uint64>(item) * twell_width;
    uint4 head = make_uint4(0, 0, 0, 0);
    if (item < end * twell.tiles && shared.nonzeros[item / twell.tiles] <= list_capacity)
      head = *reinterpret_cast<const uint4*>(words);
    const Sums sums = sum_threads(shared.sum, head.x);
    if (head.x > 0) use(words, head, shared.list.entry + before + sums.before);
    before += sums.total;
  }
}

// Fills the list with the non-zeros of the rows from `first` on, as many rows as it holds; returns the
// first row that it has no room for. Rows that overflowed have no entries.
__device__ __forceinline__ int concatenate_rows(Shared& shared, const Twell& twell, int first) {
  List& list = shared.list;
  int end = first;
  uint32 total = 0;
  for (; end < twell.rows; ++end) {
    const uint32 own = shared.nonzeros[end] > list_capacity ? 0 : shared.nonzeros[end];
    if (total + own > list_capacity) break;
    if (threadIdx.x == 0) list.first[end - first] = total;
    total += own;
  }
  if (threadIdx.x == 0) list.first[end - first] = total;
  each_tile(shared, twell, first, end, [](const uint32* words, const uint4& head, Entry* to) {
    for (uint32 i = 0; i < head.x; ++i) {
      const uint32 word = i == 0 ? head.y : i == 1 ? head.z : i == 2 ? head.w : words[i + 1];
      to[i] = Entry{word, __float_as_uint(word_value(word))};
    }
  });
  __syncthreads();
  return end;
}

// Stores the number of non-zeros and the list of rows that are left to dense_rows.
__device__ __forceinline__ void report(const Shared& shared, const Share& share, const Twell& twell,
                                       uint32* control, uint32* overflowed, uint32* observed) {
  const int first_row = share.row_block * share.rows_each;
  if (threadIdx.x < twell.rows && shared.nonzeros[threadIdx.x] > list_capacity)
    overflowed[atomicAdd(control + num_overflowed, 1)] = first_row + threadIdx.x;
  if (threadIdx.x != 0) return;
  uint64* nonzeros = reinterpret_cast<uint64*>(control + num_nonzeros);
  uint64 own = 0;
  for (int row = 0; row < twell.rows; ++row) own += shared.nonzeros[row] % not_held;
  atomicAdd(nonzeros, own);
  if (observed == nullptr) return;
  __threadfence();
  // Host memory, which the host reads asynchronously.
  if (atomicAdd(control + num_finished, 1) == share.row_blocks - 1)
    *observed = static_cast<uint32>(atomicAdd(nonzeros, 0ull) / share.m);
}

// h = gate * (up + bias), rounded as a dense model rounds both.
__device__ __forceinline__ void multiply_by_gate(List& list, int total, const element* bias,
                                                 bool relu_up) {
  for (int i = threadIdx.x; i < total; i += walk_threads) {
    const Entry own = list.entry[i];
    const uint32 neuron = word_neuron(own.word);
    float up = __uint_as_float(own.factor);
    if (bias != nullptr) up += element_low(bias[neuron]);
    up = element_low(relu_up ? pack_elements_relu(up, 0.0f) : pack_elements(up, 0.0f));
    const uint32 h = pack_elements(word_value(own.word) * up, 0.0f);
    list.entry[i].word = twell_word(h << 16, neuron);
  }
}

// Processes the rows of a block of threads, as many at a time as a list holds: calls `work(first, end)`
// with the rows that are in it.
template <typename Work>
__device__ __forceinline__ void each_list(Shared& shared, const Twell& twell, const Work& work) {
  for (int row = 0; row < twell.rows;) {
    const int end = concatenate_rows(shared, twell, row);
    work(row, end);
    __syncthreads();  // before the list is filled again
    row = end;
  }
}

__device__ __forceinline__ Twell rows_of(const Share& share, uint32* word, int tiles_n) {
  const int first_row = share.row_block * share.rows_each;
  const uint64 row_words = static_cast<uint64>(tiles_n) * twell_width;
  return {word + first_row * row_words, tiles_n, min(share.rows_each, share.m - first_row)};
}
}  // namespace

// The non-zeros of the gate become those of h, in place. Each of the two kernels reads one weight
// matrix, which L2 then holds; two matrices would evict one another (H200, rows of 4 KiB at random: 9.1
// TB/s from 22 MiB, 6.5 TB/s from 44 MiB).
extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    twell_up(const element* x_MK, uint32* word, int tiles_n, int rows_each,
             const element* w_up_NK, const element* b_up_N, int m, int k, int relu_up) {
  __shared__ Shared shared;
  await_previous_kernel();
  const Share share{rows_each, m};
  const int first_row = share.row_block * rows_each;
  const Twell twell = rows_of(share, word, tiles_n);
  count_rows(shared, twell);
  each_list(shared, twell, [&](int row, int end) {
    dot_rows(shared.list, end - row, x_MK, RowsByToken{nullptr, first_row + row}, w_up_NK, k);
    __syncthreads();
    multiply_by_gate(shared.list, shared.list.first[end - row], b_up_N, relu_up != 0);
    __syncthreads();
    each_tile(shared, twell, row, end, [](uint32* words, const uint4& head, const Entry* from) {
      for (uint32 i = 0; i < head.x; ++i) words[i + 1] = from[i].word;
    });
  });
}

// y from the non-zeros of h.
extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    twell_down(uint32* word, int tiles_n, int rows_each, const element* w_down_NK,
               const element* b_down_K, int m, int k, int slices, uint32* control,
               uint32* overflowed, uint32* observed, element* y_MK) {
  __shared__ Shared shared;
  await_previous_kernel();
  const Share share{rows_each, m};
  const int first_row = share.row_block * rows_each;
  const ColumnRange range = columns_of(share.slice, slices, k);
  const Twell twell = rows_of(share, word, tiles_n);
  count_rows(shared, twell);
  if (share.slice == 0) report(shared, share, twell, control, overflowed, observed);
  each_list(shared, twell, [&](int row, int end) {
    const RowsByToken at{nullptr, first_row + row};
    sum_rows(shared.list, end - row, b_down_K, k, range, y_MK, at, FloatFactors{w_down_NK});
  });
}
