// Products of a token block with the weight rows of its union: shared by union_up and columns_grad.
//
// The weight rows that the members of a unit name are gathered with cp.async, 64 k at a time, while
// TMA loads the tokens, or cp.async where their rows are not contiguous. Each consumer warpgroup holds
// 64 tokens × 128 members. products.cuh says what an `Op` defines.
//
// `consume` uses plain arrays, not an object per unit, and `finish` has no branches: otherwise the
// compiler keeps the values in local memory.
#pragma once
#include "common/products.cuh"
#include "sm90/gather.cuh"

namespace {
using namespace up_tiles;
constexpr int members_lane = 16;  // of a unit, that a lane finishes: 8j + lane/4 of its warpgroup
constexpr int bytes_x = block_tokens * tile_k * 2;
static_assert(tile_k * sizeof(element) == swizzle_bytes);
static_assert(block_tokens == 64 && unit_members == num_consumers * 128, "products of m64n128");
static_assert(8 * members_lane == 128, "a lane of a consumer finishes every eighth member");
static_assert(part_warps == consumer_threads / 32);
static_assert(TileScheduler::claim_at % step_group == 0 && TileScheduler::look_up_at % step_group == 0,
              "work units are looked at between groups of stages");
static_assert(registers_fit<producer_registers, consumer_registers>);

struct Shared {
  element x[stages][block_tokens * tile_k];
  element w[stages][unit_members * tile_k];
  uint64 full[stages], empty[stages];
  UnitQueue queue;
};
static_assert(fits<Shared>);
static_assert(bytes_x % swizzle_repeat == 0 && sizeof(Shared::x[0]) == bytes_x, "w is aligned, too");
static_assert(sizeof(Shared::w[0]) % swizzle_repeat == 0);
static_assert(unit_members / num_consumers * swizzle_bytes % swizzle_repeat == 0, "of a consumer");

constexpr int rows = unit_members * 8 / producer_threads;  // 16-byte chunks a thread and step
constexpr int row_step = producer_threads / 8;
static_assert(rows * row_step == unit_members);
static_assert(row_step % 8 == 0, "all rows that a thread copies have the same swizzle");

// The member of a unit that this lane finishes j-th.
__device__ __forceinline__ int member_of(int j) {
  return (threadIdx.x / warpgroup_threads - 1) * 128 + 8 * j + threadIdx.x % 32 / 4;
}

// The first of the four places of a column that this lane finishes.
struct PlaceOfLane {
  __device__ __forceinline__ operator int() const {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 4 * 4;
  }
};

constexpr int token_rows = block_tokens * 8 / producer_threads;  // the same for tokens
static_assert(token_rows * row_step == block_tokens);

// What a thread copies of a unit, from the k that comes next on.
struct Sources {
  const element* weight[rows];
  const element* token[token_rows];  // where they do not lie together
};

// Up to `step_group` stages. `whole`: every row is present and every k inside, which saves the
// predicates: four warps issue all copies, and their instructions are what the kernel waits for.
template <bool whole, bool scattered>
__device__ __forceinline__ void gather_steps(Shared& shared, PipelineState<stages>& pipeline,
                                             const Tokens& tokens, int block, Sources& from,
                                             int entries, int step, int end, uint32 k) {
  const uint32 chunk = threadIdx.x % 8, to_thread = swizzled<swizzle_bytes>(threadIdx.x / 8, chunk);
#pragma unroll
  for (int ahead = 0; ahead < step_group; ++ahead, ++step) {
    if (!whole && step >= end) break;
    mbarrier_wait(&shared.empty[pipeline.stage], pipeline.parity ^ 1);
    const uint32 bytes = whole || step * tile_k + chunk * 8 < k ? 16 : 0;
    if (scattered) {
      const uint32 to = smem_address(shared.x[pipeline.stage]) + to_thread;
      const int present = tokens.m - block * block_tokens - static_cast<int>(threadIdx.x / 8);
#pragma unroll
      for (int i = 0; i < token_rows; ++i)
        copy16_async(to + i * row_step * swizzle_bytes, from.token[i] + ahead * tile_k,
                     whole || i * row_step < present ? bytes : 0);
      if (threadIdx.x == 0) mbarrier_arrive(&shared.full[pipeline.stage]);
    } else if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&shared.full[pipeline.stage], bytes_x);
      tma_load(shared.x[pipeline.stage], tokens.map, &shared.full[pipeline.stage], step * tile_k,
               block * block_tokens);
    }
    const uint32 to = smem_address(shared.w[pipeline.stage]) + to_thread;
#pragma unroll
    for (int i = 0; i < rows; ++i)
      if (whole || i * row_step < entries)
        copy16_async(to + i * row_step * swizzle_bytes, from.weight[i] + ahead * tile_k, bytes);
    copy_arrive(&shared.full[pipeline.stage]);
    pipeline.advance();
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) from.weight[i] += step_group * tile_k;
#pragma unroll
  for (int i = 0; scattered && i < token_rows; ++i) from.token[i] += step_group * tile_k;
}

template <bool scattered, typename Op>
__device__ void produce(Shared& shared, const Op& op, const Tokens& tokens, const element* w,
                        uint32 k, int steps, const uint2* unit, uint32* control) {
  PipelineState<stages> pipeline;
  const auto look_up = [&](int index) { return unit[index]; };
  UnitIterator iterator{{shared.queue}, {control + next_up, control[num_units]}};
  for (WorkUnit own; (own = iterator.next(look_up)).index >= 0;) {
    const Part part(own);
    const int block = part.block, entries = part.members;
    const uint32* members = op.members(block) + part.start();
    Sources from;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = threadIdx.x / 8 + i * row_step;
      // What lies in rows without a member ends up in columns that nobody reads.
      const uint32 neuron = row < entries ? op.neuron(members[row]) : 0;
      from.weight[i] = w + static_cast<uint64>(neuron) * k + threadIdx.x % 8 * 8;
    }
#pragma unroll
    for (int i = 0; scattered && i < token_rows; ++i) {
      const int token = block * block_tokens + threadIdx.x / 8 + i * row_step;
      const int row = token < tokens.m ? tokens.row_of[token] : 0;
      from.token[i] = tokens.x + static_cast<uint64>(row) * k + threadIdx.x % 8 * 8;
    }
    const bool all_tokens = !scattered || (block + 1) * block_tokens <= tokens.m;
    if (entries >= unit_members && all_tokens && k % (step_group * tile_k) == 0) {
      for (int step = 0; step < steps; step += step_group) {
        iterator.prefetch_next(steps - step, look_up);
        gather_steps<true, scattered>(shared, pipeline, tokens, block, from, entries, step, steps, k);
      }
    } else {
      for (int step = 0; step < steps; step += step_group) {
        iterator.prefetch_next(steps - step, look_up);
        gather_steps<false, scattered>(shared, pipeline, tokens, block, from, entries, step, steps, k);
      }
    }
  }
}

template <typename Op>
__device__ void consume(Shared& shared, const Op& op, int steps) {
  const int consumer = threadIdx.x / warpgroup_threads - 1;
  float d[64];
  PipelineState<stages> pipeline;
  UnitReader iterator{shared.queue};
  for (WorkUnit own; (own = iterator.next()).index >= 0;) {
    const Part part(own);
    uint32 name[members_lane];
#pragma unroll
    for (int j = 0; j < members_lane; ++j)
      name[j] = member_of(j) < part.members ? op.name(part, member_of(j)) : no_entry;
    uint2 a[members_lane], b[members_lane];
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(&shared.full[pipeline.stage], pipeline.parity);
      fence_async_proxy();
      wgmma_begin();
      const uint32 x = smem_address(shared.x[pipeline.stage]);
      const uint32 w = smem_address(shared.w[pipeline.stage] + consumer * 128 * tile_k);
#pragma unroll
      for (int k = 0; k < tile_k / 16; ++k)
        wgmma_n128(d, operand(x + 32 * k), operand(w + 32 * k), step > 0 || k > 0);
      wgmma_commit();
      if (step == steps / 2) {  // the names are here by now, and this will be in time
#pragma unroll
        for (int j = 0; j < members_lane; ++j)
          if (name[j] != no_entry) op.fetch(part, name[j], PlaceOfLane(), a[j], b[j]);
      }
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % warpgroup_threads == 0) mbarrier_arrive(&shared.empty[pipeline.previous()]);
      pipeline.advance();
    }
    wgmma_wait<0>();
    if (threadIdx.x % warpgroup_threads == 0) mbarrier_arrive(&shared.empty[pipeline.previous()]);
    if (Op::shifts) {
#pragma unroll
      for (int i = 0; i < 64; ++i) d[i] += op.shift();
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < members_lane; ++j) {
      const uint2 sums = make_uint2(transpose_8x8(pack_elements(d[4 * j], d[4 * j + 1])),
                                    transpose_8x8(pack_elements(d[4 * j + 2], d[4 * j + 3])));
      if (name[j] != no_entry)
        sum += op.finish(part, member_of(j), name[j], PlaceOfLane(), sums, a[j], b[j]);
    }
    op.end(part, threadIdx.x / 32 - producer_threads / 32, sum);
  }
}

// The body of a kernel of `block_threads` threads.
template <typename Op>
__device__ __forceinline__ void run(const Op& op, const Tokens& tokens, const element* w_NK, int k,
                                    const uint2* unit, uint32* control) {
  const int steps = (k + tile_k - 1) / tile_k;
  Shared& shared = begin<Shared>(producer_threads + 1);
  if (threadIdx.x < producer_threads) {
    registers_decrease<producer_registers>();
    if (tokens.row_of != nullptr)
      produce<true>(shared, op, tokens, w_NK, k, steps, unit, control);
    else
      produce<false>(shared, op, tokens, w_NK, k, steps, unit, control);
  } else {
    registers_increase<consumer_registers>();
    consume(shared, op, steps);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_blocks = blocks_per_multiprocessor,
                                   exported_parts = part_warps,
                                   exported_shared_bytes = aligned_bytes<Shared>;
