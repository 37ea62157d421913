// place_columns, rank_neurons, plan_groups: sort the columns of a sparse pattern by neuron, for
// weight_grad (weight_grad.cuh has the result). They run in this order. All atomics are on
// integers, and no order depends on them.
#include "common/block_sums.cuh"
#include "common/strips.cuh"
#include "common/weight_grad.cuh"

namespace {
constexpr int place_threads = 256, place_blocks = 4, rank_threads = 512, plan_threads = 512;
constexpr int rank_warps = rank_threads / 32, plan_warps = plan_threads / 32;
constexpr int rank_loads = 12, rank_keys = rank_loads * rank_threads;  // compared with at once
constexpr int warp_blocks = 8;  // token blocks that a warp plans at once
constexpr uint32 min_part_pieces = 16;
constexpr int max_groups = max_neurons / group_neurons;
static_assert(rank_warps <= 32 && plan_warps <= 32);
static_assert(rank_keys % 4 == 0, "four keys are read at a time");
static_assert(warp_blocks == 8, "load_columns reads two times 16 bytes");
static_assert(plan_warps * warp_blocks * block_tokens < 1 << 16, "rows, in half a word");
static_assert(plan_warps * warp_blocks * group_neurons < 1 << 16, "members, in half a word");
static_assert(max_parts < 1 << 16 && max_groups + max_parts < 1 << 16, "slots and units, likewise");
static_assert(uint64(max_blocks) * block_tokens < 1ull << 31, "activity has 5 bits of a key");

// Columns of a line of the table: 32 bytes at a time.
__device__ __forceinline__ uint64 line_columns(int blocks) {
  return (blocks + warp_blocks - 1) / warp_blocks * warp_blocks;
}

// --- the neurons in order ------------------------------------------------------------------------

struct RankShared {
  uint32 key[rank_keys];
  uint32 before[rank_warps][32];
};

// Larger keys come first: activity to a factor of two, then the sample.
__device__ __forceinline__ uint32 key_of(uint64 count, uint32 sample) {
  return (32 - __clz(static_cast<uint32>(count >> 32))) << 27 | sample >> 5;
}

// A block of threads ranks 32 neurons: warp w compares them with every sixteenth group of four.
__device__ void rank(RankShared& shared, int n, const uint64* count, const uint32* sample,
                             uint32* order, uint32* group_columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_own = blockIdx.x * group_neurons, own = first_own + lane;
  const uint32 some_key = key_of(count[min(own, n - 1)], sample[min(own, n - 1)]);
  const uint32 own_key = own < n ? some_key : 0;
  uint32 before = 0;
  for (int first = 0; first < n; first += rank_keys) {
    uint32 key[rank_loads];
#pragma unroll
    for (int i = 0; i < rank_loads; ++i) {
      // Without a branch, so that all are loaded at once.
      const int other = min(first + i * rank_threads + static_cast<int>(threadIdx.x), n - 1);
      key[i] = key_of(count[other], sample[other]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < rank_loads; ++i) {
      const int other = first + i * rank_threads + threadIdx.x;
      // Of equal keys the first comes first. Keys of 0 are never counted: those past the last neuron,
      // and those of this block's own 32 neurons, which are compared below.
      if (other >= n || other / group_neurons == blockIdx.x) key[i] = 0;
      else if (other < first_own) ++key[i];
      shared.key[i * rank_threads + threadIdx.x] = key[i];
    }
    __syncthreads();
#pragma unroll 4
    for (int i = warp * 4; i < min(n - first, rank_keys); i += rank_warps * 4) {
      const uint4 key = *reinterpret_cast<const uint4*>(shared.key + i);
      before += (key.x > own_key) + (key.y > own_key) + (key.z > own_key) + (key.w > own_key);
    }
  }
  shared.before[warp][lane] = before;
  __syncthreads();
  if (warp > 0) return;
  for (int i = 1; i < rank_warps; ++i) before += shared.before[i][lane];
  for (int i = 0; i < group_neurons; ++i)
    before += __shfl_sync(~0u, own_key, i) + (i < lane) > own_key;
  if (own >= n) return;
  order[before] = own;
  atomicAdd(group_columns + before / group_neurons, static_cast<uint32>(count[own]));
}

// --- members, pieces and units -------------------------------------------------------------------

struct PlanShared {
  uint32 sum[plan_warps];
  uint32 last;
  uint32 rows[max_groups];
  uint32 first[plan_threads], before[plan_threads];  // of so many groups at a time
};

// The pieces that begin or end in rows [first, end) of a group, whose members are [from, to).
__device__ __forceinline__ void mark_pieces(uint2* piece, int first, int end, uint32 from,
                                            uint32 to) {
  const int begins = (first + piece_rows - 1) / piece_rows, ends = end / piece_rows;
  if (begins * piece_rows < end) piece[begins].x = from;
  if (ends > first / piece_rows) piece[ends - 1].y = to;
}

// A lane's neuron in eight token blocks, of which the first is `block`: its columns + 1, or 0.
__device__ __forceinline__ void load_columns(uint32 (&column)[warp_blocks], const uint32* line,
                                             int block, int blocks) {
  uint4 four[2] = {};
  if (line != nullptr && block < blocks) {
    four[0] = reinterpret_cast<const uint4*>(line + block)[0];
    four[1] = reinterpret_cast<const uint4*>(line + block)[1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    column[4 * i] = four[i].x;
    column[4 * i + 1] = four[i].y;
    column[4 * i + 2] = four[i].z;
    column[4 * i + 3] = four[i].w;
  }
}

// What a group has in a token block; each lane has its neuron's column there, if there is one.
struct Together {
  uint32 all[2];   // tokens for which any neuron is active
  uint32 present;  // lanes that have a column
  __device__ __forceinline__ Together(uint64 active, bool has_column)
      : all{__reduce_or_sync(~0u, static_cast<uint32>(active)),
            __reduce_or_sync(~0u, static_cast<uint32>(active >> 32))},
        present(__ballot_sync(~0u, has_column)) {}
  // Rows << 16 | members; of 128 blocks at most 8192 and 4096.
  __device__ __forceinline__ uint32 size() const {
    return (__popc(all[0]) + __popc(all[1])) << 16 | __popc(present);
  }
};

// One block of threads per group. `columns` are those of other groups: its first member comes after
// those of the groups before it. Returns its first member, and the group's rows.
__device__ uint2 plan_group(PlanShared& shared, int n, int blocks, const uint64* mask,
                            const uint32* table, const uint32* order, const uint32* columns,
                            Member* member, uint2* piece) {
  const uint32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = blockIdx.x, neuron = group * group_neurons + lane;
  const uint32 whose = neuron < n ? order[neuron] : 0;  // loads during the sum
  uint32 earlier = 0;
  for (int i = threadIdx.x; i < group; i += plan_threads) earlier += columns[i];
  const uint32* line = neuron < n ? table + whose * line_columns(blocks) : nullptr;
  uint32 next[warp_blocks];  // columns are loaded a round ahead of their masks
  load_columns(next, line, warp * warp_blocks, blocks);
  const uint32 first_member = sum_threads(shared.sum, earlier).total;
  piece += first_member + group;

  uint32 rows = 0, at = first_member;
  for (int first = 0; first < blocks; first += plan_warps * warp_blocks) {
    const int own = first + warp * warp_blocks;
    uint32 column[warp_blocks];
    uint64 active[warp_blocks];
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) column[i] = next[i];
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) active[i] = column[i] == 0 ? 0 : mask[column[i] - 1];
    load_columns(next, line, own + plan_warps * warp_blocks, blocks);
    uint32 sizes = 0;
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) sizes += Together(active[i], column[i] != 0).size();
    const Sums sums = sum_warps(shared.sum, sizes);
    uint32 before = sums.before;
#pragma unroll
    for (int i = 0; i < warp_blocks; ++i) {
      const Together together(active[i], column[i] != 0);
      const uint32 row = rows + (before >> 16), from = at + (before & 0xffffu);
      if (column[i] != 0) {
        const Member out{{static_cast<uint32>(active[i]), static_cast<uint32>(active[i] >> 32)},
                         {together.all[0], together.all[1]},
                         {static_cast<int>(row), static_cast<int>(row + __popc(together.all[0]))},
                         column[i] - 1,
                         static_cast<uint32>(own + i) << 5 | lane};
        member[from + __popc(together.present & ((1u << lane) - 1))] = out;
      }
      const uint32 size = together.size();
      if (lane == 0) mark_pieces(piece, row, row + (size >> 16), from, from + (size & 0xffffu));
      before += size;
    }
    rows += sums.total >> 16;
    at += sums.total & 0xffffu;
  }
  if (threadIdx.x == 0) {
    if (rows == 0) piece[0].x = at;
    if (rows == 0 || rows % piece_rows != 0) piece[rows / piece_rows].y = at;
  }
  return make_uint2(first_member, rows);
}

__device__ __forceinline__ uint32 pieces_of(uint32 rows) {
  return rows == 0 ? 1 : (rows + piece_rows - 1) / piece_rows;  // one piece writes the zeros
}

__device__ __forceinline__ uint32 parts_of(uint32 rows, uint32 part_pieces) {
  return (pieces_of(rows) + part_pieces - 1) / part_pieces;
}

// The shortest parts, in pieces, that there is room for. Long ones would leave multiprocessors idle
// at the end.
__device__ uint32 choose_parts(PlanShared& shared, int groups) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32 own = 0;
  for (int i = threadIdx.x; i < groups; i += plan_threads) own += pieces_of(shared.rows[i]);
  // Each warp tries a length, an eighth longer than the one of the warp before.
  uint32 part = max(min_part_pieces, sum_threads(shared.sum, own).total / (2 * max_parts));
  while (true) {
    uint32 own_part = 0;
    for (int i = 0; i < plan_warps; ++i, part += part / 8)
      if (i == warp) own_part = part;
    uint32 slots = 0;
    for (int i = lane; i < groups; i += 32) {
      const uint32 parts = parts_of(shared.rows[i], own_part);
      if (parts > 1) slots += parts;
    }
    slots = __reduce_add_sync(~0u, slots);
    __syncthreads();
    if (lane == 0) shared.sum[warp] = slots <= max_parts ? own_part : 0;
    __syncthreads();
    const uint32 found = lane < plan_warps ? shared.sum[lane] : 0;
    const uint32 fit = __ballot_sync(~0u, found != 0);
    if (fit != 0) return __shfl_sync(~0u, found, __ffs(fit) - 1);
  }
}

__device__ void make_units(PlanShared& shared, int groups, const uint32* group_rows,
                           const uint32* group_first, Unit* unit, uint32* control) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < groups; i += plan_threads)
    shared.rows[i] = __ldcg(group_rows + i);
  __syncthreads();
  const uint32 part_pieces = choose_parts(shared, groups);
  uint32 units = 0, slots = 0;
  for (int first = 0; first < groups; first += plan_threads) {
    const int own = first + threadIdx.x;
    const uint32 own_first = own < groups ? __ldcg(group_first + own) : 0;
    const uint32 own_parts = own < groups ? parts_of(shared.rows[own], part_pieces) : 0;
    // Slots << 16 | units: at most 60 and 572.
    const Sums sums = sum_threads(shared.sum, (own_parts > 1 ? own_parts : 0) << 16 | own_parts);
    shared.first[threadIdx.x] = own_first;
    shared.before[threadIdx.x] = sums.before;
    __syncthreads();
    for (int i = warp; i < min(groups - first, plan_threads); i += plan_warps) {
      const int group = first + i;
      const uint32 rows = shared.rows[group], before = shared.before[i];
      const uint32 pieces = pieces_of(rows), parts = parts_of(rows, part_pieces);
      for (uint32 part = lane; part < parts; part += 32) {
        const int from = pieces * part / parts, to = pieces * (part + 1) / parts;
        unit[units + (before & 0xffffu) + part] =
            Unit{group, static_cast<int>(rows), static_cast<int>(shared.first[i] + group + from),
                 to - from, from * piece_rows, static_cast<int>(slots + (before >> 16) + part),
                 static_cast<int>(part), static_cast<int>(parts)};
      }
    }
    units += sums.total & 0xffffu;
    slots += sums.total >> 16;
  }
  if (threadIdx.x == 0) control[total_units] = units;
}
}  // namespace

// Where each neuron's columns are, how active it is, and on which tokens. Any number of blocks.
//
// `table` [neurons][line_columns]: column + 1, or 0.
// `count`: tokens for which the neuron is active << 32 | its columns.
// `sample`: the largest hash of those tokens. Neurons that share it share a token at least, and
// likely several: side by side in a group they need fewer rows (3–8% fewer on real traces).
extern "C" __global__ void __launch_bounds__(place_threads, place_blocks)
    place_columns(int blocks, const int* offset, const uint32* neuron, const uint64* mask,
                  uint32* table, uint64* count, uint32* sample) {
  __shared__ StripScratch<place_threads> shared;
  admit_next_kernel();
  await_previous_kernel();
  const uint64 pitch = line_columns(blocks);
  const auto work = [&](const Run& run) {
    const uint32 before = run.block * block_tokens;
    for (uint32 i = run.first + run.from + threadIdx.x % 32; i < run.first + run.to; i += 32) {
      const uint32 whose = neuron[i];
      const uint64 active = mask[i];
      table[whose * pitch + run.block] = i + 1;
      atomicAdd(count + whose, static_cast<uint64>(__popcll(active)) << 32 | 1);
      uint32 largest = 0;
      // One token of each half at a time; 0 once a half has no more.
      for (uint32 low = active, high = active >> 32; (low | high) != 0;) {
        const uint32 first = low != 0 ? before + __ffs(low) : 0;
        const uint32 second = high != 0 ? before + 32 + __ffs(high) : 0;
        largest = max(largest, max(first * 2654435769u, second * 2654435769u));
        low &= low - 1;
        high &= high - 1;
      }
      atomicMax(sample + whose, largest);
    }
  };
  distribute_strips<32>(shared, blocks, [&](int block) { return offset[block + 1] - offset[block]; },
                        work);
}

// A block for each group.
extern "C" __global__ void __launch_bounds__(rank_threads, 2)
    rank_neurons(int n, const uint64* count, const uint32* sample, uint32* order,
                 uint32* group_columns) {
  __shared__ __align__(16) RankShared shared;
  admit_next_kernel();
  await_previous_kernel();
  rank(shared, n, count, sample, order, group_columns);
}

// A block for each group; the last one makes the units.
extern "C" __global__ void __launch_bounds__(plan_threads, 2)
    plan_groups(int n, int blocks, const uint64* mask, const uint32* table, const uint32* order,
                const uint32* group_columns, uint32* group_rows, uint32* group_first,
                Member* member, uint2* piece, Unit* unit, uint32* control) {
  __shared__ PlanShared shared;
  admit_next_kernel();
  await_previous_kernel();
  const uint2 group = plan_group(shared, n, blocks, mask, table, order, group_columns, member, piece);
  if (threadIdx.x == 0) {
    group_first[blockIdx.x] = group.x;
    group_rows[blockIdx.x] = group.y;
    __threadfence();
    shared.last = atomicAdd(control + groups_planned, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  make_units(shared, gridDim.x, group_rows, group_first, unit, control);
}

extern "C" __device__ const uint32 exported_blocks = place_blocks, exported_neurons = group_neurons,
                                   exported_line = warp_blocks, exported_max_parts = max_parts,
                                   exported_min_part = min_part_pieces, exported_piece_rows = piece_rows,
                                   exported_control_words = group_control_words,
                                   exported_member_words = sizeof(Member) / 4,
                                   exported_unit_words = sizeof(Unit) / 4;
