// twell_ffn: y = (gate * (x · W_upᵀ + b)) · W + b from a gate in TwELL (common/twell.cuh), W neuron by
// neuron: W_downᵀ as `nn.Linear` stores it. Up and down in one kernel: neither x · W_upᵀ nor the
// product with the gate is ever in memory (common/walk.cuh has how). Without W_up the gate is h; with
// `relu_up` up is relu'd too.
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
  const uint32* word;  // of this block's first row
  uint32 width;
  int tiles, rows;
};

// Counts the rows' non-zeros.
__device__ __forceinline__ void count_rows(Shared& shared, const Twell& twell) {
  if (threadIdx.x < max_rows) shared.nonzeros[threadIdx.x] = 0;
  __syncthreads();
  for (int item = threadIdx.x; item < twell.rows * twell.tiles; item += walk_threads) {
    const uint32 count = twell.word[static_cast<uint64>(item) * twell.width];
    if (count > 0)
      atomicAdd(shared.nonzeros + item / twell.tiles, count + (count < twell.width ? 0 : not_held));
  }
  __syncthreads();
}

// Concatenates the non-zeros of the rows from `first` on, as many rows as fit into the list; returns the
// first row that does not fit. Rows that overflowed have no entries.
__device__ __forceinline__ int concatenate_rows(Shared& shared, const Twell& twell, int first,
                                           bool gated) {
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
  uint32 before = 0;
  for (int base = first * twell.tiles; base < end * twell.tiles; base += walk_threads) {
    const int item = base + threadIdx.x;
    const uint32* from = twell.word + static_cast<uint64>(item) * twell.width;
    uint4 head = make_uint4(0, 0, 0, 0);
    if (item < end * twell.tiles && shared.nonzeros[item / twell.tiles] <= list_capacity)
      head = *reinterpret_cast<const uint4*>(from);
    const Sums sums = sum_threads(shared.sum, head.x);
    Entry* to = list.entry + before + sums.before;
    for (uint32 i = 0; i < head.x; ++i) {
      const uint32 word = i == 0 ? head.y : i == 1 ? head.z : i == 2 ? head.w : from[i + 1];
      to[i] = Entry{word, gated ? 0 : __float_as_uint(word_value(word))};
    }
    before += sums.total;
  }
  __syncthreads();
  return end;
}

// Stores the number of non-zeros and the list of rows that are left to dense_rows.
__device__ __forceinline__ void report(const Shared& shared, const Twell& twell, int first_row,
                                       int m, uint32* control, uint32* overflowed,
                                       uint32* observed) {
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
  if (atomicAdd(control + num_finished, 1) == gridDim.x - 1)
    *observed = static_cast<uint32>(atomicAdd(nonzeros, 0ull) / m);
}

// h = gate * (up + bias), rounded as a dense model rounds both.
__device__ __forceinline__ void multiply_by_gate(List& list, int total, const element* bias,
                                                 bool relu_up) {
  for (int i = threadIdx.x; i < total; i += walk_threads) {
    const Entry own = list.entry[i];
    float up = __uint_as_float(own.factor);
    if (bias != nullptr) up += element_low(bias[word_neuron(own.word)]);
    up = element_low(relu_up ? pack_elements_relu(up, 0.0f) : pack_elements(up, 0.0f));
    const uint32 h = pack_elements(word_value(own.word) * up, 0.0f);
    list.entry[i].factor = __float_as_uint(element_low(h));
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    twell_ffn(const element* x_MK, const uint32* word, int width, int tiles_n, int rows_each,
              const element* w_up_NK, const element* b_up_N, const element* w_down_NK,
              const element* b_down_K, int m, int k, int relu_up, uint32* control,
              uint32* overflowed, uint32* observed, element* y_MK) {
  __shared__ Shared shared;
  await_previous_kernel();
  const int first_row = blockIdx.x * rows_each;
  const uint64 row_words = static_cast<uint64>(tiles_n) * width;
  const Twell twell{word + first_row * row_words, static_cast<uint32>(width), tiles_n,
                    min(rows_each, m - first_row)};
  count_rows(shared, twell);
  report(shared, twell, first_row, m, control, overflowed, observed);
  for (int row = 0; row < twell.rows;) {
    const int end = concatenate_rows(shared, twell, row, w_up_NK != nullptr);
    const int rows = end - row;
    const auto at = [&](int own) { return static_cast<uint64>(first_row + row + own); };
    if (w_up_NK != nullptr) {
      dot_rows(shared.list, rows, x_MK, at, w_up_NK, k);
      __syncthreads();
      multiply_by_gate(shared.list, shared.list.first[rows], b_up_N, relu_up != 0);
      __syncthreads();
    }
    sum_rows(shared.list, rows, b_down_K, k, y_MK, at, FloatFactors{w_down_NK});
    __syncthreads();  // before the list is filled again
    row = end;
  }
}

extern "C" __device__ const uint32 twell_ffn_threads = walk_threads;
extern "C" __device__ const uint32 twell_ffn_shared_bytes = 0;
