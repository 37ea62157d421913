// The hybrid format, used in training, as the paper defines it (arXiv 2603.23198): rows with few
// non-zeros are in an ELL matrix of fixed width, the others in a dense backup; one bit per row tells
// which.
//
//   word   [M][width]  uint32  as in TwELL (common/twell.cuh): a bf16 value and its neuron, ascending
//   count  [M]         uint32  how many of them; 0 of a row in the backup
//   heavy  [M / 32]    uint32  bit r % 32: row r is in the backup
//   list   [M]         uint32  the backup's rows, ascending; how many: `num_overflowed` of `control`
//   up     [M][width]  bf16    x · W_upᵀ + b at the same places
//   gate, up  [backup][N]  bf16  of the first rows of `list`, dense
//
// Rows that do not fit into the backup are also in `list`, and are recomputed where they are needed
// (common/dense_rows.cu, dense_rows_grad.cu).
//
// The same by neuron, for the weights' gradients:
//
//   table   [token blocks][N]  uint8   of a block's 64 rows, for how many a neuron is active; not the backup's
//   before  [token blocks][N]  uint32  the sum of `table` over the blocks before, for a neuron
//   first   [N + 1]            uint32  each neuron's first place in `source`; the last is their number
//   source  [M · width]        uint32  where in `word` the non-zeros lie: by neuron, rows ascending
#pragma once
#include "common/twell.cuh"
#include "common/walk.cuh"

namespace {
// The rows of an ELL matrix that a block of threads computes: `rows`, from `first_row` on.
struct Ell : Share {
  const uint32 *word, *count;
  uint32 width;
  int first_row = row_block * rows_each, rows = min(rows_each, m - first_row);

  // Where the j-th non-zero of one of its rows lies.
  __device__ __forceinline__ uint64 at(int row, uint32 j) const {
    return static_cast<uint64>(first_row + row) * width + j;
  }
};

// Concatenates the rows; `factor(place)` is the factor of a non-zero. The list has room for all.
template <typename Factor>
__device__ __forceinline__ void concatenate_rows(List& list, const Ell& ell, const Factor& factor) {
  if (threadIdx.x == 0) {
    uint32 total = 0;
    for (int row = 0; row < ell.rows; ++row) {
      list.first[row] = total;
      total += ell.count[ell.first_row + row];
    }
    list.first[ell.rows] = total;
  }
  __syncthreads();
  for (int row = 0; row < ell.rows; ++row) {
    const uint32 from = list.first[row], entries = list.first[row + 1] - from;
    for (uint32 j = threadIdx.x; j < entries; j += walk_threads) {
      const uint64 place = ell.at(row, j);
      list.entry[from + j] = Entry{ell.word[place], factor(place)};
    }
  }
  __syncthreads();
}

// Calls `use(entry, place)` with every non-zero of the list.
template <typename Use>
__device__ __forceinline__ void each_entry(List& list, const Ell& ell, const Use& use) {
  int row = 0;
  for (uint32 i = threadIdx.x; i < list.first[ell.rows]; i += walk_threads) {
    while (list.first[row + 1] <= i) ++row;
    use(list.entry[i], ell.at(row, i - list.first[row]));
  }
}
}  // namespace
