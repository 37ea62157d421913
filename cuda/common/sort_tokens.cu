// count_ids, make_keys, rank_tokens: the order of ffn/token_order.py, for up to 32,768 tokens. Each
// token is compared with all others: for 16,384 tokens (268 million comparisons) a general sort takes
// several times as long.
#include "common/ptx.cuh"

namespace {
constexpr int threads = 512, warps = threads / 32, own_each = 4;
constexpr int own_tokens = 32 * own_each;  // of a block of threads, and what `key` is padded to

// Early or not, frequency, id; token_order.py has the same.
constexpr uint32 id_bits = 17, frequency_bits = 13;
static_assert(1 + frequency_bits + id_bits < 32, "every key is below that of the padding");
static_assert(own_tokens % 4 == 0, "four keys are read at a time");

__device__ __forceinline__ uint32 key_of(uint32 id, uint32 frequency, bool late) {
  const uint32 max_frequency = (1u << frequency_bits) - 1;
  return static_cast<uint32>(late) << (frequency_bits + id_bits) |
         min(frequency, max_frequency) << id_bits | (id & ((1u << id_bits) - 1));
}

// How many of the keys [from, to), both multiples of four, are below each of this lane's own keys.
// This warp has every sixteenth group of four.
__device__ __forceinline__ void add_below(const uint32* key, int from, int to,
                                          const uint32 (&own)[own_each], uint32 (&below)[own_each]) {
#pragma unroll 4
  for (int i = from + threadIdx.x / 32 * 4; i < to; i += warps * 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(key + i);
#pragma unroll
    for (int j = 0; j < own_each; ++j)
      below[j] += (other.x < own[j]) + (other.y < own[j]) + (other.z < own[j]) + (other.w < own[j]);
  }
}
}  // namespace

// `count`, by id, is zero before.
extern "C" __global__ void __launch_bounds__(threads)
    count_ids(const int64* id_M, int m, uint32* count) {
  await_previous_kernel();
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i < m) atomicAdd(count + id_M[i], 1u);
}

// Makes `padded` keys; of a sequence's `length` positions, the first `early` come first.
extern "C" __global__ void __launch_bounds__(threads)
    make_keys(const int64* id_M, int m, int padded, int length, int early, const uint32* count,
              uint32* key) {
  await_previous_kernel();
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i >= padded) return;
  const uint32 id = i < m ? id_M[i] : 0;
  key[i] = i < m ? key_of(id, count[id], i % length >= early) : ~0u;
}

// One block for every `own_tokens` tokens.
extern "C" __global__ void __launch_bounds__(threads)
    rank_tokens(const uint32* key, int m, int padded, int* token_M, int64* row_M) {
  await_previous_kernel();
  __shared__ uint32 sum[own_tokens];
  if (threadIdx.x < own_tokens) sum[threadIdx.x] = 0;
  __syncthreads();
  const int first = blockIdx.x * own_tokens, lane = threadIdx.x % 32;
  uint32 own[own_each], next[own_each], below[own_each] = {};
#pragma unroll
  for (int j = 0; j < own_each; ++j) {
    own[j] = key[first + j * 32 + lane];
    next[j] = own[j] + 1;  // of equals the earlier token comes first
  }
  add_below(key, 0, first, next, below);
  add_below(key, first + own_tokens, padded, own, below);
  for (int i = threadIdx.x / 32; i < own_tokens; i += warps) {
    const uint32 other = key[first + i];
#pragma unroll
    for (int j = 0; j < own_each; ++j) below[j] += other < (i < j * 32 + lane ? next[j] : own[j]);
  }
#pragma unroll
  for (int j = 0; j < own_each; ++j) atomicAdd(sum + j * 32 + lane, below[j]);
  __syncthreads();
  const int token = first + threadIdx.x;
  if (threadIdx.x >= own_tokens || token >= m) return;
  const uint32 row = sum[threadIdx.x];
  token_M[row] = token;
  row_M[token] = row;
}

extern "C" __device__ const uint32 exported_id_bits = id_bits, exported_frequency_bits = frequency_bits,
                                   exported_tokens = own_tokens;
