// Products with a few rows of a sparse matrix at a time: shared by the kernels on TwELL and on the
// hybrid format.
//
// A block of threads has up to `max_rows` rows, whose non-zeros are concatenated in shared memory as a
// `List`. `dot_rows` computes the product of each row's dense vector with the weight row of each of its
// non-zeros, which are distributed evenly over the warps. `sum_rows` adds multiples of weight rows for
// each row; there each warp computes a part of the columns. In both a weight row is a few coalesced
// loads of 16 bytes per lane, with a dozen in flight per warp: the bandwidth from L2 to the SM is the
// limit. All dot products of a block come before its sums, so that most of the GPU reads one weight
// matrix at a time.
#pragma once
#include "common/element.cuh"
#include "common/tiles.cuh"

using namespace walk_tiles;
constexpr int walk_warps = walk_threads / 32, list_capacity = max_ell_width;
static_assert(walk_threads % 32 == 0 && max_rows <= walk_threads, "a thread looks at each row");

struct Entry {
  uint32 word;    // its low half is the neuron
  uint32 factor;  // what belongs to it
};

struct List {
  Entry entry[list_capacity];
  uint32 first[max_rows + 1];  // of each row, and the end
};

// Volatile, so that the loads of several rows are all under way before the first is used. Without
// `L1::no_allocate`, though nothing is read twice from L1: with it L2 drops the rows first too, and half
// of the sectors come from device memory (H200, M 16,384, 2048/5632, 30 non-zeros: 1.24 → 0.97 ms).
__device__ __forceinline__ uint4 load_early(const element* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

namespace {
constexpr int chunk_columns = 256;  // 8 per lane
static_assert(chunk_columns == 32 * 16 / sizeof(element));

// 256 · `chunks` columns of a row from this lane's first on; those past `columns` are zero.
template <int chunks, bool whole>
__device__ __forceinline__ void load_row(uint4 (&to)[chunks], const element* from, int columns) {
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    to[c] = make_uint4(0, 0, 0, 0);
    if (whole || c * chunk_columns < columns) to[c] = load_early(from + c * chunk_columns);
  }
}

__device__ __forceinline__ void add_products(float& even, float& odd, uint32 a, uint32 b) {
  even += element_low(a) * element_low(b);
  odd += element_high(a) * element_high(b);
}
__device__ __forceinline__ void add_products(float& even, float& odd, const uint4& a,
                                             const uint4& b) {
  add_products(even, odd, a.x, b.x);
  add_products(even, odd, a.y, b.y);
  add_products(even, odd, a.z, b.z);
  add_products(even, odd, a.w, b.w);
}

constexpr int dot_columns = dot_chunks * chunk_columns;

// Adds x · w to the factors of entries `at` and, if `both`, the next; x, w: this lane's first column.
template <bool both, bool whole>
__device__ __forceinline__ void dot(Entry* at, const uint4 (&x)[dot_chunks], const element* w,
                                    uint32 row_length, int columns, bool first_slice) {
  const uint32 lane = threadIdx.x % 32;
  uint4 own[dot_chunks], next[both ? dot_chunks : 1];
  load_row<dot_chunks, whole>(own, w + static_cast<uint64>(at[0].word & 0xffffu) * row_length,
                              columns);
  if constexpr (both)
    load_row<dot_chunks, whole>(next, w + static_cast<uint64>(at[1].word & 0xffffu) * row_length,
                                columns);
  float a[2] = {}, b[2] = {};
#pragma unroll
  for (int c = 0; c < dot_chunks; ++c) {
    add_products(a[0], a[1], x[c], own[c]);
    if constexpr (both) add_products(b[0], b[1], x[c], next[c]);
  }
  // Lanes below 16 add up the first of the two.
  const float first = a[0] + a[1], second = b[0] + b[1];
  const bool upper = lane >= 16;
  float sum = (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, 16);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0 || (both && lane == 16)) {
    Entry& entry = at[lane / 16];
    entry.factor = __float_as_uint(first_slice ? sum : __uint_as_float(entry.factor) + sum);
  }
}

template <bool whole>
__device__ __forceinline__ void dot_slice(Entry* entry, int entries, const uint4 (&x)[dot_chunks],
                                          const element* w, uint32 row_length, int columns,
                                          bool first_slice) {
  int i = 0;
  for (; i + 1 < entries; i += 2)
    dot<true, whole>(entry + i, x, w, row_length, columns, first_slice);
  if (i < entries) dot<false, whole>(entry + i, x, w, row_length, columns, first_slice);
}

// Rows of a matrix in the order of the tokens, where rows are sorted tokens.
struct RowsByToken {
  const int* token;  // or null
  int first;
  __device__ __forceinline__ uint64 operator()(int row) const {
    return token == nullptr ? first + row : token[first + row];
  }
};

// `factor` of every entry ← x[its row] · w[its neuron], fp32. `row_at(i)`: the row of x that is the
// i-th of `rows`. The caller synchronises the block before it reads the factors.
__device__ __forceinline__ void dot_rows(List& list, int rows, const element* x,
                                         const RowsByToken& row_at, const element* w, int k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int total = list.first[rows], share = (total + walk_warps - 1) / walk_warps;
  const int to = min(total, (warp + 1) * share);
  int row = 0;
  for (int at = warp * share; at < to;) {
    while (static_cast<int>(list.first[row + 1]) <= at) ++row;
    const int end = min(to, static_cast<int>(list.first[row + 1]));
    const element* own_x = x + row_at(row) * k;
    for (int slice = 0; slice < k; slice += dot_columns) {
      const int column = slice + 8 * lane, columns = k - column;
      const element* from = own_x + column;
      uint4 own[dot_chunks];
#pragma unroll
      for (int c = 0; c < dot_chunks; ++c) {
        own[c] = make_uint4(0, 0, 0, 0);
        if (c * chunk_columns < columns)
          own[c] = *reinterpret_cast<const uint4*>(from + c * chunk_columns);
      }
      if (slice + dot_columns <= k)
        dot_slice<true>(list.entry + at, end - at, own, w + column, k, columns, slice == 0);
      else
        dot_slice<false>(list.entry + at, end - at, own, w + column, k, columns, slice == 0);
    }
    at = end;
  }
}

constexpr int sum_columns = sum_chunks * chunk_columns;

__device__ __forceinline__ void add_multiple(float (&sum)[8], float factor, const uint4& w) {
  const uint32 word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += factor * element_low(word[i]);
    sum[2 * i + 1] += factor * element_high(word[i]);
  }
}

// Adds the multiples of up to eight weight rows; w: this lane's first column.
template <bool all, bool whole, typename Factor>
__device__ __forceinline__ void add_rows(float (&sum)[sum_chunks][8], const Entry* entry,
                                         int entries, const element* w, uint32 row_length,
                                         int columns, const Factor& factor) {
  uint4 row[sum_entries][sum_chunks];
#pragma unroll
  for (int i = 0; i < sum_entries; ++i) {
    const bool there = all || i < entries;
    const uint64 neuron = there ? entry[i].word & 0xffffu : 0;
    load_row<sum_chunks, all && whole>(row[i], w + neuron * row_length, there ? columns : 0);
  }
#pragma unroll
  for (int i = 0; i < sum_entries; ++i) {
    const float own = all || i < entries ? factor(entry[i].factor) : 0.0f;
#pragma unroll
    for (int c = 0; c < sum_chunks; ++c) add_multiple(sum[c], own, row[i][c]);
  }
}

template <bool whole, typename Factor>
__device__ __forceinline__ void add_list(float (&sum)[sum_chunks][8], const Entry* entry,
                                         int entries, const element* w, uint32 row_length,
                                         int columns, const Factor& factor) {
  int i = 0;
  for (; i + sum_entries <= entries; i += sum_entries)
    add_rows<true, whole>(sum, entry + i, sum_entries, w, row_length, columns, factor);
  if (i < entries)
    add_rows<false, whole>(sum, entry + i, entries - i, w, row_length, columns, factor);
}

// y[row] ← Σ over its entries of their factor, as `Source` reads it, times w[neuron], over all
// sources; and bias (or null). `row_at(i)`: the row of y that is the i-th of `rows`. A `Source` has
// `weights` (N, K) and turns the bits of a factor into a float.
template <float (*value_of)(uint32)>
struct Factors {
  const element* weights;
  __device__ __forceinline__ float operator()(uint32 factor) const { return value_of(factor); }
};
using FloatFactors = Factors<__uint_as_float>;

template <bool whole, typename... Source>
__device__ __forceinline__ void sum_row(const Entry* entry, int entries, const element* bias, int k,
                                        int column, element* y, const Source&... source) {
  float sum[sum_chunks][8] = {};
  (add_list<whole>(sum, entry, entries, source.weights + column, k, k - column, source), ...);
#pragma unroll
  for (int c = 0; c < sum_chunks; ++c) {
    const int at = column + c * chunk_columns;
    const float (&own)[8] = sum[c];
    if (whole || at < k)
      *reinterpret_cast<uint4*>(y + at) =
          make_uint4(pack_biased(own[0], own[1], bias, at, k),
                     pack_biased(own[2], own[3], bias, at + 2, k),
                     pack_biased(own[4], own[5], bias, at + 4, k),
                     pack_biased(own[6], own[7], bias, at + 6, k));
  }
}

// What a block of threads computes: `rows_each` of m rows, and one of the slices of the columns. Rows vary
// fastest, so that all blocks of threads that run at a time are at the same slice.
struct Share {
  int rows_each, m;
  int row_blocks = (m + rows_each - 1) / rows_each;
  int row_block = blockIdx.x % row_blocks, slice = blockIdx.x / row_blocks;
};

// The columns of a product that a launch computes; a warp takes `sum_columns` of a row at a time.
struct ColumnRange {
  int first, end;
};

// Part `slice` of `slices` of k columns: L2 then holds what is read of the weights at a time.
__device__ __forceinline__ ColumnRange columns_of(int slice, int slices, int k) {
  const int pieces = (k + sum_columns - 1) / sum_columns, each = (pieces + slices - 1) / slices;
  return {slice * each * sum_columns, min(k, (slice + 1) * each * sum_columns)};
}

template <typename... Source>
__device__ __forceinline__ void sum_rows(const List& list, int rows, const element* bias, int k,
                                         const ColumnRange& range, element* y,
                                         const RowsByToken& row_at, const Source&... source) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pieces = (max(0, range.end - range.first) + sum_columns - 1) / sum_columns;
  for (int item = warp; item < rows * pieces; item += walk_warps) {
    const int row = item / pieces, slice = range.first + item % pieces * sum_columns;
    const uint32 from = list.first[row];
    const int entries = list.first[row + 1] - from;
    element* to = y + row_at(row) * k;
    if (slice + sum_columns <= k)
      sum_row<true>(list.entry + from, entries, bias, k, slice + 8 * lane, to, source...);
    else
      sum_row<false>(list.entry + from, entries, bias, k, slice + 8 * lane, to, source...);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_columns = sum_columns;
