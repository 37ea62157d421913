// Products of a token block with the weight rows of its union: shared by union_up and columns_grad, as
// sm90/up.cuh on Hopper. products.cuh says what an `Op` defines.
//
// The tokens and the weight rows that a unit's members name come with cp.async, 32 k at a time.
#pragma once
#include "common/products.cuh"
#include "sm80/ring.cuh"

namespace {
constexpr int row_bytes = stage_inner * 2;
static_assert(unit_columns == unit_members);

struct alignas(128) Shared {
  unsigned char x[stages][block_tokens * row_bytes];
  unsigned char w[stages][unit_columns * row_bytes];
  WorkUnit unit[2];
};

// What a thread copies of every stage: 16 bytes of one token's row and of four members' rows.
constexpr int row_step = block_threads / 4, rows = unit_columns / row_step;
static_assert(fits<Shared>);
static_assert(row_bytes == 4 * 16, "four threads copy a row");
static_assert(row_step == block_tokens, "of one token's row");
static_assert(rows * row_step == unit_columns);

struct Source {
  const element* x;
  const element* w[rows];
  int k_left;  // from this thread's chunk on, never negative for a whole stage
  int members;
  bool token;  // is there one
};

template <typename Op>
__device__ __forceinline__ Source source_of(const Op& op, const Part& part, const Tokens& tokens,
                                            const element* w, int k) {
  const int row = threadIdx.x / 4, chunk = threadIdx.x % 4 * 8;
  int token = part.block * block_tokens + row;
  const bool present = token < tokens.m;
  if (tokens.row_of != nullptr && present) token = tokens.row_of[token];
  const uint32* list = op.members(part.block) + part.start();
  Source from{tokens.x + static_cast<uint64>(token) * k + chunk, {}, k - chunk, part.members,
              present};
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int at = row + i * row_step;
    const uint32 neuron = at < part.members ? op.neuron(list[at]) : 0;
    from.w[i] = w + static_cast<uint64>(neuron) * k + chunk;
  }
  return from;
}

__device__ __forceinline__ void copy_stage(Shared& shared, int stage, Source& from) {
  const int row = threadIdx.x / 4;
  const uint32 to = swizzled<row_bytes>(row, threadIdx.x % 4), bytes = from.k_left > 0 ? 16 : 0;
  copy16_async(smem_address(shared.x[stage]) + to, from.x, from.token ? bytes : 0);
  from.x += stage_inner;
  const uint32 to_w = smem_address(shared.w[stage]) + to;
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    // What lies in rows without a member ends up in columns that nobody reads.
    if (row + i * row_step < from.members)
      copy16_async(to_w + i * row_step * row_bytes, from.w[i], bytes);
    from.w[i] += stage_inner;
  }
  from.k_left -= stage_inner;
}

// A warp's columns are 16 of every 64 members, so that a small unit is shared by all warps;
// `groups` counts those 16s that have members.
constexpr int group_step = 64, max_groups = unit_columns / group_step;
static_assert(group_step == 4 * 16, "the warps of 32 tokens have 16 columns each");
static_assert(2 * max_groups * 8 == warp_columns, "in two fragments of eight columns");
static_assert(part_warps == block_threads / 32);

template <bool whole>
__device__ __forceinline__ void multiply_stage(const Shared& shared, int stage, int groups,
                                               Sums& d) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 of_x = swizzled<row_bytes>(warp / 4 * 32 + lane % 16, lane / 16);
  const uint32 of_w = swizzled<row_bytes>(warp % 4 * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < stage_inner / mma_inner; ++k) {
    const uint32 from_x = smem_address(shared.x[stage]) + (of_x ^ 32 * k);
    const uint32 from_w = smem_address(shared.w[stage]) + (of_w ^ 32 * k);
    uint32 x[2][4];
    load_matrices(x[0], from_x);
    load_matrices(x[1], from_x + 16 * row_bytes);
#pragma unroll
    for (int group = 0; group < max_groups; ++group) {
      if (!whole && group >= groups) break;
      uint32 w[4];
      load_matrices(w, from_w + group * group_step * row_bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(d[half][2 * group], x[half], w[0], w[1]);
        mma(d[half][2 * group + 1], x[half], w[2], w[3]);
      }
    }
  }
}

// The member of a unit that this lane finishes j-th, once the sums are transposed: of a warp's 16s,
// the eight that it is in.
__device__ __forceinline__ int member_of(int j) {
  return j / 2 * group_step + threadIdx.x / 32 % 4 * 16 + j % 2 * 8 + threadIdx.x % 32 / 4;
}

// The first of the four places of a column that this lane finishes, of the first or second 16 tokens
// of its warp.
struct PlaceOfLane {
  int half;
  __device__ __forceinline__ operator int() const {
    return threadIdx.x / 128 * 32 + half * 16 + threadIdx.x % 4 * 4;
  }
};

template <typename Op>
__device__ __forceinline__ void finish(const Op& op, const Part& part, const Sums& d) {
  uint32 name[8];
#pragma unroll
  for (int j = 0; j < 8; ++j)
    name[j] = member_of(j) < part.members ? op.name(part, member_of(j)) : no_entry;
  float sum = 0.0f;
  // As many loads at a time as there are registers for; none of them may pass a store.
  constexpr int batch = 2;
#pragma unroll
  for (int first = 0; first < 8; first += batch) {
    uint2 a[batch][2] = {}, b[batch][2] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (name[first + i] != no_entry)
          op.fetch(part, name[first + i], PlaceOfLane{half}, a[i][half], b[i][half]);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int j = first + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&own)[4] = d[half][j];
        const float shift = Op::shifts ? op.shift() : 0.0f;
        const uint2 sums = make_uint2(transpose_8x8(pack_elements(own[0] + shift, own[1] + shift)),
                                      transpose_8x8(pack_elements(own[2] + shift, own[3] + shift)));
        if (name[j] != no_entry)
          sum += op.finish(part, member_of(j), name[j], PlaceOfLane{half}, sums, a[i][half],
                           b[i][half]);
      }
    }
  }
  op.end(part, threadIdx.x / 32, sum);
}

// The body of a kernel of `block_threads` threads.
template <typename Op>
__device__ __forceinline__ void run(const Op& op, const Tokens& tokens, const element* w_NK, int k,
                                    const uint2* unit, uint32* control) {
  Shared& shared = dynamic_shared<Shared>();
  await_previous_kernel();
  const int steps = (k + stage_inner - 1) / stage_inner;
  const auto look_up = [&](int index) { return unit[index]; };
  UnitIterator iterator(shared.unit, control + next_up, control[num_units]);
  for (WorkUnit own; (own = iterator.next(look_up)).index >= 0;) {
    Part part(own);
    part.members = min(part.members, unit_members);
    const int groups = (part.members - threadIdx.x / 32 % 4 * 16 + group_step - 1) / group_step;
    Source from = source_of(op, part, tokens, w_NK, k);
    Sums d = {};
    run_ring(
        steps, [&](int stage) { copy_stage(shared, stage, from); },
        [&](int stage) {
          if (groups >= max_groups)
            multiply_stage<true>(shared, stage, groups, d);
          else
            multiply_stage<false>(shared, stage, groups, d);
        },
        [&](int left) { iterator.prefetch_next(left, look_up); });
    finish(op, part, d);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_blocks = blocks_per_multiprocessor,
                                   exported_parts = part_warps, exported_shared_bytes = sizeof(Shared);
