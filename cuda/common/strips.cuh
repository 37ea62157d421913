// Distributes columns evenly over the warps of a grid: the columns of each token block are divided into
// strips of a few, and each warp gets equally many contiguous strips. A token block can have eight times
// as many columns as most others, since all neurons can be active for a sequence's first token. With one block
// of threads per token block, union_columns took 179 µs when that happened and 45 when it did not (H200,
// M 16384, N 5632, real traces).
#pragma once
#include "common/ptx.cuh"

// A warp's part of a token block: columns [from, to) of its `columns`, which begin at column `first` of
// all blocks.
struct Run {
  int block;
  uint32 first, columns, from, to;
};

template <int threads>
struct StripScratch {
  uint32 strip[threads + 1], column[threads + 1];  // before each token block, of so many at a time
  uint2 sum[threads / 32];
};

// `count(block)` is a block's number of columns; whole warps call `work(run)`. Every block has a strip,
// even if it is empty. The assignment depends only on the counts and the grid.
template <int strip_columns, int threads, typename Count, typename Work>
__device__ __forceinline__ void distribute_strips(StripScratch<threads>& shared, int blocks,
                                             const Count& count, const Work& work) {
  static_assert(threads % 32 == 0 && threads <= 1024);
  constexpr int warps = threads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto strips_of = [](uint32 columns) {
    return columns == 0 ? 1 : (columns + strip_columns - 1) / strip_columns;
  };
  uint32 all = 0;
  for (int block = threadIdx.x; block < blocks; block += threads) all += strips_of(count(block));
  all = __reduce_add_sync(~0u, all);
  if (lane == 0) shared.sum[warp].x = all;
  __syncthreads();
  all = 0;
  for (int i = 0; i < warps; ++i) all += shared.sum[i].x;
  const uint32 num_warps = gridDim.x * warps, share = all / num_warps, rest = all % num_warps;
  const auto first_of = [&](uint32 number) { return number * share + min(number, rest); };
  const uint32 own_first = first_of(blockIdx.x * warps + warp);
  const uint32 own_end = first_of(blockIdx.x * warps + warp + 1);
  const uint32 last_end = first_of(blockIdx.x * warps + warps);

  uint2 before = make_uint2(0, 0);  // strips, columns
  for (int base = 0; base < blocks && before.x < last_end; base += threads) {
    const int block = base + threadIdx.x;
    uint2 sum = make_uint2(0, 0);
    if (block < blocks) {
      sum.y = count(block);
      sum.x = strips_of(sum.y);
    }
    sum = make_uint2(sum_to_lane(sum.x), sum_to_lane(sum.y));
    __syncthreads();  // all have read what the next lines overwrite
    if (lane == 31) shared.sum[warp] = sum;
    if (threadIdx.x == 0) {
      shared.strip[0] = before.x;
      shared.column[0] = before.y;
    }
    __syncthreads();
    for (int i = 0; i < warps; ++i) {
      const uint2 other = shared.sum[i];
      before.x += other.x;
      before.y += other.y;
      if (i >= warp) continue;
      sum.x += other.x;
      sum.y += other.y;
    }
    // `sum` leaves out what came before this round's blocks; `before` already includes this round's.
    shared.strip[threadIdx.x + 1] = shared.strip[0] + sum.x;
    shared.column[threadIdx.x + 1] = shared.column[0] + sum.y;
    __syncthreads();
    if (own_first >= before.x || own_end <= shared.strip[0]) continue;
    int at = 0;
    for (int i = lane; i < threads; i += 32)
      at += __popc(__ballot_sync(~0u, shared.strip[i + 1] <= own_first));
    for (; at < threads && shared.strip[at] < own_end; ++at) {
      const uint32 strip = shared.strip[at], first = shared.column[at];
      const uint32 columns = shared.column[at + 1] - first;
      const uint32 from = max(own_first, strip) - strip;
      const uint32 to = min(own_end, shared.strip[at + 1]) - strip;
      work(Run{base + at, first, columns, from * strip_columns, min(to * strip_columns, columns)});
    }
  }
}
