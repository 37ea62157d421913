// group_columns: sorts the columns of a sparse pattern by neuron, for weight_grad (its .cuh has the
// result). Four launches, in order; integer atomics only, and no order that depends on them.
#include "weight_grad.cuh"

namespace {
constexpr int most_threads = 512, most_warps = most_threads / 32;
constexpr int warp_blocks = 8;  // token blocks that a warp plans at once

struct Shared {
  uint32 key[256];
  uint32 rank[8][32];
  uint32 sum[most_warps];
  uint32 last;
};

__device__ __forceinline__ uint64 both(uint32 low, uint32 high) {
  return static_cast<uint64>(high) << 32 | low;
}

// --- how active each neuron is, and on which tokens ----------------------------------------------

// One block of threads a token block. `count`: tokens that fire the neuron << 32 | its columns.
// `sample`: the largest hash of those tokens. Neurons that share it share a token at least, and
// likely several: side by side in a group they need fewer rows (3–8% of real traces').
__device__ void count_columns(const int* offset, const uint32* neuron, const uint64* mask,
                              uint64* count, uint32* sample) {
  const int block = blockIdx.x;
  for (int i = offset[block] + threadIdx.x; i < offset[block + 1]; i += blockDim.x) {
    uint32 largest = 0;
    for (uint64 left = mask[i]; left != 0; left &= left - 1) {
      const uint32 token = block * block_tokens + __ffsll(left);
      largest = max(largest, token * 2654435769u);
    }
    atomicAdd(count + neuron[i], both(1, __popcll(mask[i])));
    atomicMax(sample + neuron[i], largest);
  }
}

// --- the neurons in order ------------------------------------------------------------------------

// The larger the earlier: activity to a factor of two, then the sample.
__device__ __forceinline__ uint32 key_of(uint64 count, uint32 sample) {
  return (32 - __clz(static_cast<uint32>(count >> 32))) << 27 | sample >> 5;
}

// One block of 256 threads for 32 neurons: warp w compares them with every eighth 32 of all.
__device__ void rank_neurons(Shared& shared, int n, const uint64* count, const uint32* sample,
                             uint32* rank, uint32* order, uint32* group_columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = blockIdx.x * group_neurons + lane;
  const uint32 own_key = own < n ? key_of(count[own], sample[own]) : 0;
  uint32 before = 0;
  for (int first = 0; first < n; first += 256) {
    const int other = first + threadIdx.x;
    __syncthreads();
    // What is not there has the last key and the last number: it comes before nothing.
    shared.key[threadIdx.x] = other < n ? key_of(count[other], sample[other]) : 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32 earlier = first + warp * 32 + i < own;
      before += shared.key[warp * 32 + i] + earlier > own_key;
    }
  }
  shared.rank[warp][lane] = before;
  __syncthreads();
  if (warp > 0 || own >= n) return;
  for (int i = 1; i < 8; ++i) before += shared.rank[i][lane];
  rank[own] = before;
  order[before] = own;
  atomicAdd(group_columns + before / group_neurons, static_cast<uint32>(count[own]));
}

// --- a table of who has a column where -----------------------------------------------------------

// `table` [groups][blocks][32]: column + 1, or 0.
__device__ void scatter_columns(const int* offset, const uint32* neuron, const uint32* rank,
                                uint32* table) {
  const uint64 blocks = gridDim.x;
  for (int i = offset[blockIdx.x] + threadIdx.x; i < offset[blockIdx.x + 1]; i += blockDim.x) {
    const uint32 place = rank[neuron[i]];
    const uint64 line = place / group_neurons * blocks + blockIdx.x;
    table[line * group_neurons + place % group_neurons] = i + 1;
  }
}

// --- members, pieces and units -------------------------------------------------------------------

// What a block of threads finds between them: the sum before this thread, and of all.
struct Sums {
  uint32 before, total;
};

__device__ Sums sum_threads(Shared& shared, uint32 own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32 sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.sum[warp] = sum;
  __syncthreads();
  const uint32 of_warp = lane < blockDim.x / 32 ? shared.sum[lane] : 0;
  const uint32 earlier = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
  return {earlier + sum - own, __reduce_add_sync(~0u, of_warp)};
}

// The pieces that begin or end in rows [first, end) of a group, whose members are [from, to).
__device__ __forceinline__ void mark_pieces(uint2* piece, int first, int end, uint32 from,
                                            uint32 to) {
  const int begins = (first + piece_rows - 1) / piece_rows, ends = end / piece_rows;
  if (begins * piece_rows < end) piece[begins].x = from;
  if (ends > first / piece_rows) piece[ends - 1].y = to;
}

// One block of 512 threads a group. Returns its rows.
__device__ int plan_group(Shared& shared, int blocks, const uint64* mask, const uint32* table,
                          uint32 first_member, Member* member, uint2* piece) {
  const uint32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;
  uint32 rows = 0, at = first_member;
  for (int first = 0; first < blocks; first += most_warps * warp_blocks) {
    const int own = first + warp * warp_blocks;
    uint32 column[warp_blocks];
    uint64 fires[warp_blocks];
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) {
      const uint64 line = static_cast<uint64>(group) * blocks + own + i;
      column[i] = own + i < blocks ? table[line * group_neurons + lane] : 0;
    }
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) fires[i] = column[i] == 0 ? 0 : mask[column[i] - 1];
    // Rows << 16 | members, of these 128 blocks: at most 8192 and 4096.
    uint32 size[warp_blocks], sizes = 0;
    uint32 all[warp_blocks][2];
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) {
      all[i][0] = __reduce_or_sync(~0u, static_cast<uint32>(fires[i]));
      all[i][1] = __reduce_or_sync(~0u, static_cast<uint32>(fires[i] >> 32));
      size[i] = (__popc(all[i][0]) + __popc(all[i][1])) << 16 |
                __popc(__ballot_sync(~0u, column[i] != 0));
      sizes += size[i];
    }
    const Sums sums = sum_threads(shared, lane == 31 ? sizes : 0);
    uint32 before = __shfl_sync(~0u, sums.before, 31);
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) {
      const uint32 row = rows + (before >> 16), from = at + (before & 0xffffu);
      const uint32 present = __ballot_sync(~0u, column[i] != 0);
      if (column[i] != 0) {
        const Member out{{static_cast<uint32>(fires[i]), static_cast<uint32>(fires[i] >> 32)},
                         {all[i][0], all[i][1]},
                         {static_cast<int>(row), static_cast<int>(row + __popc(all[i][0]))},
                         column[i] - 1,
                         static_cast<uint32>(own + i) << 5 | lane};
        member[from + __popc(present & ((1u << lane) - 1))] = out;
      }
      if (lane == 0) mark_pieces(piece, row, row + (size[i] >> 16), from, from + __popc(present));
      before += size[i];
    }
    rows += sums.total >> 16;
    at += sums.total & 0xffffu;
  }
  if (threadIdx.x == 0) {
    if (rows == 0) piece[0].x = at;
    if (rows == 0 || rows % piece_rows != 0) piece[rows / piece_rows].y = at;
  }
  return rows;
}

__device__ __forceinline__ uint32 pieces_of(uint32 rows) {
  return rows == 0 ? 1 : (rows + piece_rows - 1) / piece_rows;  // zeros are written by someone too
}

__device__ __forceinline__ uint32 parts_of(uint32 rows, uint32 part_pieces) {
  return (pieces_of(rows) + part_pieces - 1) / part_pieces;
}

// The shortest parts, in pieces, that there is room for. Long ones would leave multiprocessors idle
// at the end.
__device__ uint32 choose_parts(Shared& shared, int groups, const uint32* group_rows) {
  uint32 own = 0;
  for (int i = threadIdx.x; i < groups; i += blockDim.x) own += pieces_of(__ldcg(group_rows + i));
  const uint32 total = sum_threads(shared, own).total;
  for (uint32 part = max(16u, total / (2 * most_parts));; part += part / 8) {
    uint32 slots = 0;
    for (int i = threadIdx.x; i < groups; i += blockDim.x) {
      const uint32 parts = parts_of(__ldcg(group_rows + i), part);
      if (parts > 1) slots += parts;
    }
    if (sum_threads(shared, slots).total <= most_parts) return part;
  }
}

__device__ void make_units(Shared& shared, int groups, const uint32* group_rows,
                           const uint32* group_first, Unit* unit, uint32* control) {
  const uint32 part_pieces = choose_parts(shared, groups, group_rows);
  uint32 units = 0, slots = 0;
  for (int first = 0; first < groups; first += blockDim.x) {
    const int group = first + threadIdx.x;
    const int rows = group < groups ? __ldcg(group_rows + group) : 0;
    const int parts = group < groups ? parts_of(rows, part_pieces) : 0;
    // Slots << 16 | units: at most 60 and 572.
    const Sums sums = sum_threads(shared, (parts > 1 ? parts : 0) << 16 | parts);
    const int pieces = pieces_of(rows);
    for (int part = 0; part < parts; ++part) {
      const int from = static_cast<uint64>(pieces) * part / parts;
      const int to = static_cast<uint64>(pieces) * (part + 1) / parts;
      unit[units + (sums.before & 0xffffu) + part] =
          Unit{group, rows, static_cast<int>(__ldcg(group_first + group) + group + from), to - from,
               from * piece_rows, static_cast<int>(slots + (sums.before >> 16) + part), part,
               parts};
    }
    units += sums.total & 0xffffu;
    slots += sums.total >> 16;
  }
  if (threadIdx.x == 0) control[total_units] = units;
}

__device__ void plan(Shared& shared, int blocks, const uint64* mask, const uint32* table,
                     const uint32* group_columns, uint32* group_rows, uint32* group_first,
                     Member* member, uint2* piece, Unit* unit, uint32* control) {
  const int group = blockIdx.x;
  uint32 columns = 0;
  for (int i = threadIdx.x; i < group; i += blockDim.x) columns += group_columns[i];
  const uint32 first = sum_threads(shared, columns).total;
  const int rows = plan_group(shared, blocks, mask, table, first, member, piece + first + group);
  if (threadIdx.x == 0) {
    group_rows[group] = rows;
    group_first[group] = first;
    __threadfence();
    shared.last = atomicAdd(control + groups_planned, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  make_units(shared, gridDim.x, group_rows, group_first, unit, control);
}
}  // namespace

// `launch` 0 and 2: a block of threads a token block; 1 (256 threads) and 3 (512): a group.
extern "C" __global__ void __launch_bounds__(most_threads)
    group_columns(int launch, int n, int blocks, const int* offset, const uint32* neuron,
                  const uint64* mask, uint64* count, uint32* sample, uint32* rank, uint32* order,
                  uint32* columns, uint32* table, uint32* rows, uint32* first, Member* member,
                  uint2* piece, Unit* unit, uint32* control) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  await_previous_kernel();
  if (launch == 0) count_columns(offset, neuron, mask, count, sample);
  if (launch == 1) rank_neurons(shared, n, count, sample, rank, order, columns);
  if (launch == 2) scatter_columns(offset, neuron, rank, table);
  if (launch == 3)
    plan(shared, blocks, mask, table, columns, rows, first, member, piece, unit, control);
}

extern "C" __device__ const uint32 group_columns_shared_bytes = sizeof(Shared);
