// Sums of weight rows over a token block's union: shared by union_down and columns_down.
//
// A work unit is one block of 64 tokens × 512 output columns. It runs over the block's union, 32
// members per stage: their columns and the 1024-byte slices of their weight rows are gathered with
// cp.async. Each consumer warpgroup holds 64 tokens × 256 columns. Both operands are stored with
// k, the member, as the slow index, which wgmma reads as "transposed".
//
// A heavy block is several units (units.cuh: `Splitting`). row_sums.cuh says what an `Op` defines.
#pragma once
#include "common/row_sums.cuh"
#include "sm90/gather.cuh"

namespace {
using namespace down_tiles;
constexpr int panel_bytes = stage_entries * panel * 2;
static_assert(panel * sizeof(element) == swizzle_bytes && panel_bytes % swizzle_repeat == 0);
static_assert(block_tokens * sizeof(element) == swizzle_bytes, "a member's column is a row");
static_assert(stage_entries == 32, "each lane has the entry of a member");
static_assert(stage_entries % 16 == 0, "the k of a wgmma");
static_assert(unit_columns == num_consumers * 256, "a consumer's products are m64n256");
static_assert(unit_columns * sizeof(element) == 2 * 32 * 16, "a warp copies a row in two halves");
static_assert(stage_entries * 8 % producer_threads == 0, "a thread copies chunks of the columns");
static_assert(producer_threads / 8 % 8 == 0, "which have the same swizzle");
static_assert(registers_fit<producer_registers, consumer_registers>);

struct Shared {
  element h[stages][stage_entries * block_tokens];
  element w[stages][unit_columns / panel][stage_entries * panel];
  uint64 full[stages], empty[stages];
  UnitQueue queue;
};
static_assert(fits<Shared>);
static_assert(sizeof(Shared::h[0]) % swizzle_repeat == 0, "w is aligned, too");
static_assert(sizeof(Shared::w[0]) % swizzle_repeat == 0);

// One stage. `whole`: all rows and columns are there. `first`: the stage's first member.
template <bool whole, typename Op>
__device__ __forceinline__ void gather_stage(const Op& op, uint32 stage_w, uint32 stage_h,
                                             uint32 own, const char* from_w, uint32 row_bytes,
                                             uint32 column, uint32 columns, const element* from_h,
                                             int first, int present) {
  // A warp copies every fourth row, its 1024 bytes in two halves.
  const uint32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 to_even = lane / 8 * panel_bytes + swizzled<swizzle_bytes>(warp, lane % 8);
  const uint32 to_odd = lane / 8 * panel_bytes + swizzled<swizzle_bytes>(warp + 4, lane % 8);
#pragma unroll
  for (int i = 0; i < stage_entries / 4; ++i) {
    const int row = 4 * i + warp;
    const uint32 neuron = op.neuron(__shfl_sync(~0u, own, row));
    const char* source = from_w + static_cast<uint64>(neuron) * row_bytes;
    const uint32 to = stage_w + (i % 2 == 0 ? to_even : to_odd) + i / 2 * 1024;
    const bool left = whole || (row < present && column < columns);
    const bool right = whole || (row < present && column + unit_columns / 2 < columns);
    copy16_async(to, source, left ? 16 : 0);
    copy16_async(to + 4 * panel_bytes, source + unit_columns, right ? 16 : 0);
  }
  const uint32 h_row = threadIdx.x / 8, to_h = stage_h + swizzled<swizzle_bytes>(h_row, threadIdx.x % 8);
#pragma unroll
  for (int i = 0; i < stage_entries * 8 / producer_threads; ++i) {
    const int row = i * (producer_threads / 8) + h_row;
    const uint32 place = op.place(__shfl_sync(~0u, own, row), first + row);
    const uint32 to = to_h + i * (producer_threads / 8) * swizzle_bytes, bytes = whole || row < present ? 16 : 0;
    if (Op::rare)
      copy16_async(to, from_h + place, bytes, evict_first());
    else
      copy16_async(to, from_h + place, bytes);
  }
}

// `total` members of a block's union, from one pair of columns and weights. `before_stage(left)` is
// called before each stage, with the number of those from it on.
template <typename Op, typename BeforeStage>
__device__ __forceinline__ void gather_source(Shared& shared, PipelineState<stages>& pipeline,
                                              const Op& op, const element* w, const element* h,
                                              const uint32* members, int total, uint32 first_column,
                                              uint32 columns, BeforeStage before_stage) {
  const uint32 lane = threadIdx.x % 32, row_bytes = 2 * columns, column = first_column + lane * 8;
  const bool all_columns = first_column + unit_columns <= columns;
  const char* from_w = reinterpret_cast<const char*>(w + column);
  const element* from_h = h + threadIdx.x % 8 * 8;
  // Lane l keeps member l of the stage; those of the next stages are being loaded.
  const uint32* list = members + lane;
  uint32 ahead[lookahead];
#pragma unroll
  for (int i = 0; i < lookahead; ++i)
    ahead[i] = static_cast<int>(lane) + i * stage_entries < total ? list[i * stage_entries] : 0;
  list += lookahead * stage_entries;
  for (int first = 0; first < total; first += stage_entries) {
    const int present = total - first;
    const uint32 own = ahead[0];
#pragma unroll
    for (int i = 0; i < lookahead - 1; ++i) ahead[i] = ahead[i + 1];
    ahead[lookahead - 1] = static_cast<int>(lane) < present - lookahead * stage_entries ? *list : 0;
    list += stage_entries;
    before_stage((present + stage_entries - 1) / stage_entries);
    mbarrier_wait(&shared.empty[pipeline.stage], pipeline.parity ^ 1);
    const uint32 stage_w = smem_address(shared.w[pipeline.stage]);
    const uint32 stage_h = smem_address(shared.h[pipeline.stage]);
    if (all_columns && present >= stage_entries)
      gather_stage<true>(op, stage_w, stage_h, own, from_w, row_bytes, column, columns, from_h,
                         first, present);
    else
      gather_stage<false>(op, stage_w, stage_h, own, from_w, row_bytes, column, columns, from_h,
                          first, present);
    copy_arrive(&shared.full[pipeline.stage]);
    pipeline.advance();
  }
}

template <typename Op>
__device__ void produce(Shared& shared, const Op& op, uint32 columns, int units_k,
                       const SumWork& work) {
  PipelineState<stages> pipeline;
  const auto look_up = [&](int index) { return work.order[index / units_k]; };
  UnitIterator iterator{{shared.queue}, {work.control + next_down, work.control[num_parts] * units_k}};
  for (WorkUnit unit; (unit = iterator.next(look_up)).index >= 0;) {
    const int block = block_of(unit.a), column = unit.index % units_k * unit_columns;
    const int first = split_of(unit.a) == 0 ? 0 : work.split[split_of(unit.a) - 1].x;
    for (int source = 0, sources = op.num_sources(); source < sources; ++source)
      gather_source(shared, pipeline, op, op.weights(source), op.columns(source, block, first),
                    op.members(block) + first, unit.b, column, columns,
                    [&](int left) { if (source == sources - 1) iterator.prefetch_next(left, look_up); });
  }
}

// A warpgroup's sums over the next `steps` stages.
__device__ __forceinline__ void sum_steps(Shared& shared, PipelineState<stages>& pipeline, int steps,
                                          float (&d)[128]) {
  const int consumer = threadIdx.x / warpgroup_threads - 1;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(&shared.full[pipeline.stage], pipeline.parity);
    fence_async_proxy();
    wgmma_begin();
    const uint32 a = smem_address(shared.h[pipeline.stage]);
    const uint32 b = smem_address(shared.w[pipeline.stage][consumer * 4]);
#pragma unroll
    for (int s = 0; s < stage_entries / 16; ++s)
      wgmma_n256<1>(d, operand(a + 2048 * s), operand(b + 2048 * s, panel_bytes),
                    step > 0 || s > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && threadIdx.x % warpgroup_threads == 0) mbarrier_arrive(&shared.empty[pipeline.previous()]);
    pipeline.advance();
  }
  wgmma_wait<0>();
  if (threadIdx.x % warpgroup_threads == 0) mbarrier_arrive(&shared.empty[pipeline.previous()]);
}

// Eight neighbouring columns of a row of sums, rounded, for a 16-byte store: of the row that `half` of
// the fragment is, of 32 columns from `first` + 32 · group on, this lane's of its quad.
template <typename Sum>
__device__ __forceinline__ uint4 octet_of(Sum sum, int half, int group, const element* bias,
                                          int first, int columns) {
  uint32 word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = 4 * (4 * group + j) + 2 * half;
    word[j] = pack_biased(sum(at), sum(at + 1), bias,
                          first + 32 * group + 8 * j + 2 * (threadIdx.x % 4), columns);
  }
  return transpose_quad(word);
}

// Where 64 × 256 sums of a warpgroup go: this thread's rows of y, or -1, and the first column.
struct Output {
  element* y;
  const element* bias;  // or null
  int k, column;
  int row[2];
};

template <typename Sum>
__device__ __forceinline__ void store(const Output& to, Sum sum) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    element* out = to.y + static_cast<int64>(to.row[half]) * to.k;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const uint4 octet = octet_of(sum, half, group, to.bias, to.column, to.k);
      const int column = to.column + 32 * group + 8 * (threadIdx.x % 4);
      if (to.row[half] >= 0 && column < to.k) *reinterpret_cast<uint4*>(out + column) = octet;
    }
  }
}

// The 128 sums that a thread of a consumer warpgroup holds.
struct Tile {
  using Values = float[128];
  static constexpr int quads = 32, threads = consumer_threads;
  static __device__ __forceinline__ float& at(Values& d, int i) { return d[i]; }
  static __device__ __forceinline__ int thread() { return threadIdx.x - producer_threads; }
  static __device__ __forceinline__ void sync() {
    named_barrier_sync<consumer_barrier, threads>();
  }
};
static_assert(4 * Tile::quads * Tile::threads == block_tokens * unit_columns, "the sums of a unit");

// `token_M`: the row of y that each token of a block is, or null where it is its number.
__device__ void consume(Shared& shared, int num_sources, int m, int k, int units_k,
                         const SumWork& work, const element* bias, const int* token_M, element* y) {
  __shared__ bool last;
  const int lane = threadIdx.x % 32, consumer = threadIdx.x / warpgroup_threads - 1;
  const int first_row = threadIdx.x / 32 % 4 * 16;
  float d[128];
  PipelineState<stages> pipeline;
  UnitReader iterator{shared.queue};
  for (WorkUnit unit; (unit = iterator.next()).index >= 0;) {
    const int entries = unit.b, slice = unit.index % units_k;
    Output unit_y{y, bias, k, slice * unit_columns + consumer * 256};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_of(unit.a) * block_tokens + first_row + token_at(lane / 4 + 8 * half);
      unit_y.row[half] = row >= m ? -1 : token_M == nullptr ? row : token_M[row];
    }
    if (entries == 0) {
      store(unit_y, [](int) { return 0.0f; });
      continue;
    }
    sum_steps(shared, pipeline, (entries + stage_entries - 1) / stage_entries * num_sources, d);
    const uint32 split = split_of(unit.a);
    if (split == 0 || add_parts<Tile>(last, work, split - 1, units_k, slice, d))
      store(unit_y, [&](int i) { return d[i]; });
  }
}

// The body of a kernel: y ← the sums + bias (or null), see `consume`.
template <typename Op>
__device__ __forceinline__ void run(const Op& op, const element* bias_K, int m, int k,
                                    const SumWork& work, const int* token_M, element* y_MK) {
  Shared& shared = begin<Shared>(producer_threads);
  const int units_k = (k + unit_columns - 1) / unit_columns;
  if (threadIdx.x < producer_threads) {
    registers_decrease<producer_registers>();
    produce(shared, op, k, units_k, work);
  } else {
    registers_increase<consumer_registers>();
    consume(shared, op.num_sources(), m, k, units_k, work, bias_K, token_M, y_MK);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_blocks = blocks_per_multiprocessor,
                                   exported_columns = unit_columns,
                                   exported_shared_bytes = aligned_bytes<Shared>;
