// Sums of weight rows over a token block's union: shared by union_down, columns_down and weight_grad, as
// sm90/down.cuh on Hopper. row_sums.cuh says what an `Op` defines.
//
// A work unit is one block of 64 tokens × 256 output columns. It runs over the block's union, 32
// members per stage: their columns and 512-byte slices of their weight rows are copied by cp.async.
// Both are stored with the member as the slow index; ldmatrix transposes them. A heavy block is several
// units (units.cuh: `Splitting`), each of a part of its members.
#pragma once
#include "common/row_sums.cuh"
#include "sm80/ring.cuh"

namespace {
constexpr int h_bytes = block_tokens * 2, w_bytes = unit_columns * 2;  // a row: one member

struct alignas(128) Shared {
  unsigned char h[stages][stage_inner * h_bytes];
  unsigned char w[stages][stage_inner * w_bytes];
  WorkUnit unit[2];
};
static_assert(fits<Shared>);
static_assert(stage_inner == 32, "each lane has the word of a member");
static_assert(w_bytes == 32 * 16, "a warp copies a row of weights");
static_assert(stage_inner % (block_threads / 32) == 0);
static_assert(stage_inner * h_bytes == block_threads * 16, "a thread copies 16 bytes of a column");

// A thread's position in the stages of a unit: of each stage it copies 16 bytes of one member's column and of
// four members' weights, `total` of them from the block's `begin`-th on. Sources come one after the
// other, each with all members.
template <typename Op>
struct Gather {
  static constexpr int lookahead = 3;  // stages whose words are loaded before their turn
  const Op& op;
  const int block, begin, total;
  const uint32 row_values, bytes;  // of a row of weights; of this thread's copies of them: 16 or 0
  const uint32* list;              // this lane's word of the next stage to look at
  const element *w, *h;               // this thread's part of row 0
  int source = 0, unlisted, present, first = 0;  // members from there on; the next stage's first
  uint32 ahead[lookahead];                       // this lane's words

  __device__ __forceinline__ Gather(const Op& op, int block, int begin, int total,
                                    uint32 row_values, uint32 first_column)
      : op(op),
        block(block),
        begin(begin),
        total(total),
        row_values(row_values),
        bytes(first_column + threadIdx.x % 32 * 8 < row_values ? 16 : 0),
        list(op.members(block) + begin + threadIdx.x % 32),
        w(op.weights(0) + first_column + threadIdx.x % 32 * 8),
        h(op.columns(0, block, begin) + threadIdx.x % 8 * 8),
        unlisted(total),
        present(total) {
#pragma unroll
    for (int i = 0; i < lookahead; ++i) ahead[i] = next_word();
  }

  __device__ __forceinline__ int num_stages() const {
    return (total + stage_inner - 1) / stage_inner * op.num_sources();
  }

  __device__ __forceinline__ uint32 next_word() {
    const uint32 word = static_cast<int>(threadIdx.x % 32) < unlisted ? *list : 0;
    unlisted -= stage_inner;
    list += stage_inner;
    if (Op::max_sources > 1 && unlisted <= 0) {
      list -= total - unlisted;
      unlisted = total;
    }
    return word;
  }

  __device__ __forceinline__ void copy(Shared& shared, int stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 own = ahead[0];
#pragma unroll
    for (int i = 0; i < lookahead - 1; ++i) ahead[i] = ahead[i + 1];
    ahead[lookahead - 1] = next_word();

    // Absent members are zeros in both operands: zero times stale memory could be NaN.
    const uint32 to_w = smem_address(shared.w[stage]) + swizzled<w_bytes>(warp, lane);
#pragma unroll
    for (int i = 0; i < stage_inner / 8; ++i) {
      const int row = 8 * i + warp;
      const uint32 neuron = op.neuron(__shfl_sync(~0u, own, row));
      copy16_async(to_w + 8 * i * w_bytes, w + static_cast<uint64>(neuron) * row_values,
                   row < present ? bytes : 0);
    }
    const int row = threadIdx.x / 8;
    const uint32 place = op.place(__shfl_sync(~0u, own, row), first + row);
    const uint32 to_h = smem_address(shared.h[stage]) + swizzled<h_bytes>(row, threadIdx.x % 8);
    // Without an L2 policy (`rare`), which ptxas 13.0 makes into LDGSTS [R + UR], desc[UR] here: an H200
    // stops at it with an illegal instruction.
    copy16_async(to_h, h + place, row < present ? 16 : 0);
    present -= stage_inner;
    first += stage_inner;
    if (Op::max_sources > 1 && present <= 0 && source + 1 < op.num_sources()) {
      w += op.weights(source + 1) - op.weights(source);
      h += op.columns(source + 1, block, begin) - op.columns(source, block, begin);
      present = total;
      first = 0;
      ++source;
    }
  }
};

__device__ __forceinline__ void multiply_stage(const Shared& shared, int stage, Sums& d) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 of_h =
      swizzled<h_bytes>(lane / 16 * 8 + lane % 8, warp / 4 * 4 + lane / 8 % 2);
  const uint32 of_w = swizzled<w_bytes>(lane % 16, warp % 4 * 8 + lane / 16);
#pragma unroll
  for (int k = 0; k < stage_inner; k += mma_inner) {
    const uint32 from_h = smem_address(shared.h[stage]) + k * h_bytes;
    const uint32 from_w = smem_address(shared.w[stage]) + k * w_bytes;
    uint32 h[2][4];
    load_matrices_transposed(h[0], from_h + of_h);
    load_matrices_transposed(h[1], from_h + (of_h ^ 32));
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // of 16 columns
      uint32 w[4];
      load_matrices_transposed(w, from_w + (of_w ^ 32 * group));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(d[half][2 * group], h[half], w[0], w[1]);
        mma(d[half][2 * group + 1], h[half], w[2], w[3]);
      }
    }
  }
}

// The sums of a unit, or of its first 32 rows alone.
template <bool all_rows, typename Op, typename PrefetchNext>
__device__ __forceinline__ void sum_rows(Shared& shared, Gather<Op>& from, Sums& d,
                                         PrefetchNext prefetch_next) {
  run_ring(
      from.num_stages(), [&](int stage) { from.copy(shared, stage); },
      [&](int stage) {
        if (all_rows || threadIdx.x < block_threads / 2) multiply_stage(shared, stage, d);
      },
      prefetch_next);
}

// The 64 sums that a thread has.
struct Tile {
  using Values = Sums;
  static constexpr int quads = 16, threads = block_threads;
  static __device__ __forceinline__ float& at(Values& d, int i) { return d[i / 32][i / 4 % 8][i % 4]; }
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};
static_assert(4 * Tile::quads * Tile::threads == block_tokens * unit_columns, "the sums of a unit");

// A warp's sums, whose first token and column are `row` and `column`, plus the bias (or null).
// `token_M`: the row of y that each token is, or null where it is its number.
__device__ __forceinline__ void store(const Sums& d, const element* bias, const int* token_M,
                                      element* y, int m, int k, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {  // rows of the same 16: lane / 4, and 8 below
    const int own = row + eight / 2 * 16 + token_at(lane / 4 + eight % 2 * 8);
    const int token = token_M == nullptr || own >= m ? own : token_M[own];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int first = column + 32 * part;
      uint32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* sum = d[eight / 2][4 * part + j] + eight % 2 * 2;
        word[j] = pack_biased(sum[0], sum[1], bias, first + 8 * j + 2 * (lane % 4), k);
      }
      const uint4 octet = transpose_quad(word);  // 8 columns a lane: 16-byte stores
      const int at = first + 8 * (lane % 4);
      if (own < m && at < k)
        *reinterpret_cast<uint4*>(y + static_cast<uint64>(token) * k + at) = octet;
    }
  }
}

// The body of a kernel of `block_threads` threads: y ← the sums + bias (or null); `token_M` as in
// `store`.
template <typename Op>
__device__ __forceinline__ void run(const Op& op, const element* bias_K, int m, int k,
                                    const SumWork& work, const int* token_M, element* y_MK) {
  __shared__ bool last;
  Shared& shared = dynamic_shared<Shared>();
  await_previous_kernel();
  const int warp = threadIdx.x / 32, units_k = (k + unit_columns - 1) / unit_columns;
  const auto look_up = [&](int index) { return work.order[index / units_k]; };
  UnitIterator iterator(shared.unit, work.control + next_down, work.control[num_parts] * units_k);
  for (WorkUnit own; (own = iterator.next(look_up)).index >= 0;) {
    const int block = block_of(own.a), slice = own.index % units_k;
    const uint32 split = split_of(own.a);
    const int begin = split == 0 ? 0 : work.split[split - 1].x;
    Gather<Op> from(op, block, begin, own.b, k, slice * unit_columns);
    Sums d = {};
    sum_rows<true>(shared, from, d, [&](int left) { iterator.prefetch_next(left, look_up); });
    if (split == 0 || add_parts<Tile>(last, work, split - 1, units_k, slice, d))
      store(d, bias_K, token_M, y_MK, m, k, block * block_tokens + warp / 4 * 32,
            slice * unit_columns + warp % 4 * 64);
  }
}
}  // namespace

extern "C" __device__ const uint32 exported_blocks = blocks_per_multiprocessor,
                                   exported_columns = unit_columns,
                                   exported_shared_bytes = sizeof(Shared);
