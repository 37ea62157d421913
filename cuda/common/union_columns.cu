// union_columns: the union format → columns (columns.cuh), and the statistics of its pattern.
//
// Members are divided among warps (strips.cuh), which take 16 at a time, eight lanes per member. Counts
// are added up by integer atomics: `nnz_M`, each token's non-zeros, and `active_N`, each neuron's
// tokens, both zeroed by the caller. `l1` (or null) gets Σ relu(z) of each warp. `token_M` (or null) is
// where in `nnz_M` each row's count belongs. `needed`, zeroed by the caller, gets the number of columns
// and of non-zeros, by which the backward pass reserves memory.
#include "common/activation.cuh"
#include "common/columns.cuh"
#include "common/strips.cuh"

namespace {
using namespace column_tiles;
constexpr int warps = threads / 32, lanes = 8, groups = 32 / lanes, steps = batch / groups;
static_assert(lanes * 8 == block_tokens, "a lane has 16 bytes of a column");
static_assert(steps == 4, "join_tokens joins the bits of four members");
static_assert(batch <= 32, "a lane loads an entry");

using Shared = StripScratch<threads>;

// Which of a lane's eight values are not zero: bits 0 to 3 and 8 to 11 stand for their tokens, to which
// lane % 2 * 4 is added (token_at). Adds them to `count`: of each word's values, the first in the low half.
__device__ __forceinline__ uint32 active_tokens(const uint4& eight, uint32 (&count)[4]) {
  uint32 word[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Neither half carries: a value without its sign, not zero, reaches its half's top bit.
    word[i] = ((word[i] & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u;
    count[i] += word[i];
  }
  const uint32 bits = word[0] | word[2] << 2 | word[1] << 8 | word[3] << 10;
  return (bits | bits >> 15) & 0x0f0fu;
}

// A lane has 16 tokens' bits of four members; it gets all 64 bits of one, the member of `step_of_lane`.
__device__ __forceinline__ uint64 join_tokens(const uint32 (&bits)[steps]) {
  const uint32 lane = threadIdx.x;
  const uint32 early = bits[0] | bits[1] << 16, late = bits[2] | bits[3] << 16;
  const uint32 own = (lane & 1 ? late : early) |
                     __shfl_xor_sync(~0u, lane & 1 ? early : late, 1);  // 16 tokens of two members
  const uint32 other = __shfl_xor_sync(~0u, own, 2);
  const uint32 low = lane & 2 ? other : own, high = lane & 2 ? own : other;
  const uint32 first = __byte_perm(low, high, 0x5410), second = __byte_perm(low, high, 0x7632);
  const uint32 half = lane & 4 ? second : first;
  const uint32 rest = __shfl_xor_sync(~0u, lane & 4 ? first : second, 4);
  return lane & 4 ? static_cast<uint64>(half) << 32 | rest : static_cast<uint64>(rest) << 32 | half;
}
__device__ __forceinline__ int step_of_lane() {
  return threadIdx.x % 2 * 2 + threadIdx.x / 4 % 2;
}

// Adds up the four lanes that count the same tokens. A half of a word can only count to 65,535, and
// the last sum can be one more.
__device__ __forceinline__ void add_counts(const uint32 (&count)[4], int block, int m,
                                           const int* token_M, uint32* nnz_M,
                                           unsigned long long* nnz) {
  const uint32 lane = threadIdx.x % 32;
  const bool late = lane & 8, odd = lane & 16;
  uint32 kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    kept[i] = (late ? count[2 + i] : count[i]) +
              __shfl_xor_sync(~0u, late ? count[i] : count[2 + i], 8);
  const uint32 own = odd ? kept[1] : kept[0];
  const uint32 other = __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], 16);
  const int row = block * block_tokens + lane % 8 / 2 * 16 + lane % 2 * 4 + odd * 8 + late * 2;
  const uint32 first = (own & 0xffffu) + (other & 0xffffu), second = (own >> 16) + (other >> 16);
  const auto add = [&](int at, uint32 more) {
    if (more != 0 && at < m) atomicAdd(nnz_M + (token_M == nullptr ? at : token_M[at]), more);
  };
  add(row, first);
  add(row + 1, second);
  // No neuron is active for the padding behind the last token.
  const uint32 all = __reduce_add_sync(~0u, first + second);
  if (lane == 0) atomicAdd(nnz, static_cast<unsigned long long>(all));
}

// Without a gate no value is negative.
__device__ __forceinline__ float sum_inverse(uint32 pair) {
  return is_relu() ? sum_abs(pair) : inverse(element_low(pair)) + inverse(element_high(pair));
}
}  // namespace

extern "C" __global__ void __launch_bounds__(threads, blocks_each)
    union_columns(const uint32* entry, const uint32* total, const element* value, int tiles_n,
                  int m, uint64 capacity, uint32* offset, uint32* neuron, uint64* mask,
                  element* columns, uint32* active_N, const int* token_M, uint32* nnz_M,
                  unsigned long long* needed, float* l1) {
  Shared& shared = dynamic_shared<Shared>();
  admit_next_kernel();
  await_previous_kernel();
  const int blocks = (m + block_tokens - 1) / block_tokens;
  const uint32 lane = threadIdx.x % 32, part = lane % lanes, group = lane / lanes;
  float sum = 0.0f;
  const auto keep = [&](const Run& run) {
    if (run.from == 0 && lane == 0) {
      offset[run.block] = run.first;
      if (run.block == blocks - 1) {
        offset[blocks] = run.first + run.columns;
        needed[0] = run.first + run.columns;
      }
    }
    const uint64 base = static_cast<uint64>(run.block) * tiles_n * tile_neurons;
    const uint4* from = reinterpret_cast<const uint4*>(value + base * block_tokens) + part;
    uint4* to = reinterpret_cast<uint4*>(columns) + static_cast<uint64>(run.first) * lanes + part;
    // Of the members of this token block, those that there is room for.
    const uint32 kept = capacity > run.first ? min(capacity - run.first, uint64(run.columns)) : 0;
    uint32 count[4] = {};
    const auto load_entry = [&](uint32 start) {
      const uint32 i = start + lane % batch;
      return i < run.to ? entry[base + i] : 0;
    };
    uint32 next = load_entry(run.from);
    for (uint32 start = run.from; start < run.to; start += batch) {
      const uint32 members = next;
      next = load_entry(start + batch);
      uint4 eight[steps];
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const uint32 place = step * groups + group;
        const uint32 slot = entry_slot(__shfl_sync(~0u, members, place));
        eight[step] = make_uint4(0, 0, 0, 0);
        if (start + place < run.to) eight[step] = from[slot * lanes];
      }
      uint32 bits[steps];
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const uint4& own = eight[step];
        const uint32 i = start + step * groups + group;
        bits[step] = active_tokens(own, count) << part % 2 * 4;
        if (l1 != nullptr)
          sum += sum_inverse(own.x) + sum_inverse(own.y) + sum_inverse(own.z) + sum_inverse(own.w);
        if (i < min(run.to, kept)) to[static_cast<uint64>(i) * lanes] = own;
      }
      const uint64 tokens = join_tokens(bits);
      const uint32 place = step_of_lane() * groups + group, i = start + place;
      const uint32 active_neuron = entry_neuron(__shfl_sync(~0u, members, place));
      const bool mine = i < run.to && (part & 2) == 0;  // two lanes have each
      if (mine) atomicAdd(active_N + active_neuron, __popcll(tokens));
      if (mine && i < kept) {
        neuron[run.first + i] = active_neuron;
        mask[run.first + i] = tokens;
      }
    }
    add_counts(count, run.block, m, token_M, nnz_M, needed + 1);
  };
  distribute_strips<batch>(shared, blocks, [&](int block) { return total[block]; }, keep);
  if (l1 == nullptr) return;
  sum = add_warp(sum);
  if (lane == 0) l1[blockIdx.x * warps + threadIdx.x / 32] = sum;
}

extern "C" __device__ const uint32 exported_blocks = blocks_each, exported_batch = batch,
                                   exported_shared_bytes = sizeof(Shared);
