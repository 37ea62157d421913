// pack_union: a dense gate before its relu → the union format. For GPUs other than Hopper, where a
// dense GEMM makes the gate; union_entries comes next, as after gate_union.
//
// One block of threads per token block and tile. It reads 64 × 256 values once, and stages them in
// shared memory, from where the column of each neuron that is active is written transposed. Bound by memory.
#include "common/activation.cuh"
#include "common/mma.cuh"
#include "common/union.cuh"

namespace {
constexpr int block_threads = 256, warps = block_threads / 32;
constexpr int warp_rows = block_tokens / warps;
constexpr int chunk_neurons = 8;  // 16 bytes
constexpr int row_bytes = tile_neurons * 2;
static_assert(warp_rows * warps == block_tokens);
static_assert(tile_neurons == 32 * chunk_neurons, "each lane has a chunk");
static_assert(warps == 8, "active_chunk reads a byte of each warp at once");

struct alignas(128) Shared {
  unsigned char tile[block_tokens * row_bytes];
  unsigned char active[tile_neurons / chunk_neurons][warps];  // bit i: neuron i of the chunk
};

// The activation, with FATReLU's threshold; NaN passes, as through a dense relu.
__device__ __forceinline__ uint32 apply_threshold(uint32 pair, float threshold) {
  const float low = element_low(pair), high = element_high(pair);
  return activated(
      pack_elements_relu(low <= threshold ? 0.0f : low, high <= threshold ? 0.0f : high));
}

// Bits `2 * word` and the next: which halves, of at most 0x7fff each, are not zero.
__device__ __forceinline__ uint32 nonzero(uint32 halves, int word) {
  const uint32 carried = halves + 0x7fff7fffu;
  return (carried >> 15 & 1 | carried >> 30 & 2) << 2 * word;
}

// This warp's rows into shared memory; returns which of the lane's 8 neurons are active for them.
__device__ __forceinline__ uint32 stage_rows(Shared& shared, const element* gate, float threshold,
                                             int rows, bool inside, int n) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint4 chunk[warp_rows];
#pragma unroll
  for (int i = 0; i < warp_rows; ++i) {
    const int row = warp * warp_rows + i;
    chunk[i] = make_uint4(0, 0, 0, 0);
    if (inside && row < rows)
      chunk[i] = __ldcs(reinterpret_cast<const uint4*>(gate + static_cast<uint64>(row) * n));
  }
  uint4 any = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < warp_rows; ++i) {
    const uint4 kept = make_uint4(apply_threshold(chunk[i].x, threshold), apply_threshold(chunk[i].y, threshold),
                                  apply_threshold(chunk[i].z, threshold), apply_threshold(chunk[i].w, threshold));
    *reinterpret_cast<uint4*>(shared.tile + swizzled<row_bytes>(warp * warp_rows + i, lane)) = kept;
    any = make_uint4(any.x | kept.x, any.y | kept.y, any.z | kept.z, any.w | kept.w);
  }
  return nonzero(any.x, 0) | nonzero(any.y, 1) | nonzero(any.z, 2) | nonzero(any.w, 3);
}

// The neurons of the lane's chunk that are active for any of the 64 tokens.
__device__ __forceinline__ uint32 active_chunk(const Shared& shared, int lane) {
  const uint2 each = *reinterpret_cast<const uint2*>(shared.active[lane]);
  uint32 bits = each.x | each.y;
  bits |= bits >> 16;
  return (bits | bits >> 8) & 0xffu;
}

// Writes the members and their columns, 8 neurons at a time; a warp takes every eighth chunk.
__device__ __forceinline__ void write_members(const Shared& shared, uint32 active, uint32 place,
                                              unsigned char* neuron, element* value) {
  const int lane = threadIdx.x % 32, own = lane / 4;
  for (int chunk = threadIdx.x / 32; chunk < tile_neurons / chunk_neurons; chunk += warps) {
    const uint32 members = __shfl_sync(~0u, active, chunk);
    const uint32 first = __shfl_sync(~0u, place, chunk);
    if (members == 0) continue;
    const bool is_active = members >> own & 1;
    const uint32 slot = first + __popc(members & ((1u << own) - 1));
    element* column = value + slot * block_tokens + 4 * (lane % 4);
#pragma unroll
    for (int token = 0; token < block_tokens; token += 32) {
      // Transposed, a lane has one neuron's values of two neighbouring tokens of each 8.
      uint32 pair[4];
      load_matrices_transposed(pair, smem_address(shared.tile + swizzled<row_bytes>(token + lane, chunk)));
      if (!is_active) continue;
      *reinterpret_cast<uint2*>(column + token) = make_uint2(pair[0], pair[1]);
      *reinterpret_cast<uint2*>(column + token + 16) = make_uint2(pair[2], pair[3]);
    }
    if (is_active && lane % 4 == 0)
      neuron[slot] = static_cast<unsigned char>(chunk * chunk_neurons + own);
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads)
    pack_union(const element* gate_MN, float threshold, int m, int n, uint32* count,
               unsigned char* neuron, element* value, uint32* control) {
  Shared& shared = dynamic_shared<Shared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles_n = (n + tile_neurons - 1) / tile_neurons;
  const int block = blockIdx.x / tiles_n, tile = blockIdx.x % tiles_n;
  await_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < control_words) control[threadIdx.x] = 0;

  const int column = tile * tile_neurons + lane * chunk_neurons;
  const element* gate = gate_MN + static_cast<uint64>(block) * block_tokens * n + column;
  shared.active[lane][warp] = static_cast<unsigned char>(
      stage_rows(shared, gate, threshold, m - block * block_tokens, column < n, n));
  __syncthreads();
  const uint32 active = active_chunk(shared, lane);
  uint32 place = sum_to_lane(__popc(active));
  if (threadIdx.x == 31) count[blockIdx.x] = place;
  place -= __popc(active);
  write_members(shared, active, place, neuron + static_cast<uint64>(blockIdx.x) * tile_neurons,
                value + static_cast<uint64>(blockIdx.x) * tile_neurons * block_tokens);
}

extern "C" __device__ const uint32 exported_shared_bytes = sizeof(Shared);
