// union_columns: the union format → columns (columns.cuh), and the statistics of its pattern.
//
// One block of threads a token block; eight lanes a member. `nnz_M` gets each token's non-zeros,
// `fired_N` (zeroed by the caller) each neuron's tokens, `l1` (or null) Σ|value| by warps.
#include "columns.cuh"

namespace {
constexpr int threads = 256, warps = threads / 32, lanes = 8, members_warp = 32 / lanes;

// Members of all token blocks before this one.
__device__ __forceinline__ uint32 members_before(const uint32* total, int block) {
  __shared__ uint32 part[warps];
  uint32 sum = 0;
  for (int other = threadIdx.x; other < block; other += threads) sum += total[other];
  sum = __reduce_add_sync(~0u, sum);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < warps; ++warp) sum += part[warp];
  return sum;
}

// Bits of the tokens, of 64, that fire among the eight places that a lane has.
__device__ __forceinline__ uint64 fired_tokens(const uint4& eight, int lane) {
  const uint32 pair[4] = {eight.x, eight.y, eight.z, eight.w};
  uint64 bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32 value = i % 2 == 0 ? pair[i / 2] : pair[i / 2] >> 16;
    const int token = lane / 2 * 16 + token_at(lane % 2 * 8 + i);
    bits |= static_cast<uint64>((value & 0x7fffu) != 0) << token;
  }
  return bits;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(threads)
    union_columns(const uint32* entry, const uint32* total, const bf16* value, int tiles_n, int m,
                  uint64 capacity, uint32* offset, uint32* neuron, uint64* mask, bf16* columns,
                  uint32* fired_N, uint32* nnz_M, float* l1) {
  __shared__ uint32 nnz[block_tokens];
  await_previous_kernel();
  const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % lanes;
  if (threadIdx.x < block_tokens) nnz[threadIdx.x] = 0;
  const uint32 first = members_before(total, block), members = total[block];
  if (threadIdx.x == 0) {
    offset[block] = first;
    if (block == gridDim.x - 1) offset[block + 1] = first + members;
  }
  const uint64 base = static_cast<uint64>(block) * tiles_n * tile_neurons;
  uint32 count[8] = {};
  float sum = 0.0f;
  for (uint32 start = warp * members_warp; start < members; start += threads / lanes) {
    const uint32 i = start + threadIdx.x % 32 / lanes;
    uint64 tokens = 0;
    uint32 member = 0;
    if (i < members) {
      member = entry[base + i];
      const uint4 eight = reinterpret_cast<const uint4*>(
          value + (base + entry_slot(member)) * block_tokens)[lane];
      tokens = fired_tokens(eight, lane);
#pragma unroll
      for (int place = 0; place < 8; ++place)
        count[place] += tokens >> (lane / 2 * 16 + token_at(lane % 2 * 8 + place)) & 1;
      if (l1 != nullptr) sum += sum_abs(eight.x) + sum_abs(eight.y) + sum_abs(eight.z) + sum_abs(eight.w);
      if (first + i < capacity)
        reinterpret_cast<uint4*>(columns + static_cast<uint64>(first + i) * block_tokens)[lane] =
            eight;
    }
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) tokens |= __shfl_xor_sync(~0u, tokens, step);
    if (i < members && lane == 0) {
      atomicAdd(fired_N + entry_neuron(member), __popcll(tokens));
      if (first + i < capacity) {
        neuron[first + i] = entry_neuron(member);
        mask[first + i] = tokens;
      }
    }
  }
#pragma unroll
  for (int place = 0; place < 8; ++place)
    atomicAdd(nnz + lane / 2 * 16 + token_at(lane % 2 * 8 + place), count[place]);
  if (l1 != nullptr) {
    sum = add_warp(sum);
    if (threadIdx.x % 32 == 0) l1[block * warps + warp] = sum;
  }
  __syncthreads();
  const int token = block * block_tokens + threadIdx.x;
  if (threadIdx.x < block_tokens && token < m) nnz_M[token] = nnz[threadIdx.x];
}

extern "C" __device__ const uint32 union_columns_shared_bytes = 0;
