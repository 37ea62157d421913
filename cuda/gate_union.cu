// gate_union: relu(x · Wᵀ), kept as the union format (union.cuh) instead of a dense M × N matrix.
//
// x_MK, w_NK bf16 row-major. Block tile 128 tokens × 256 neurons × 64 k, two blocks a cluster that
// share the weight tile: each loads half of it and multicasts. One producer warp feeds a ring of
// four stages through TMA; two consumer warpgroups of 64 tokens each hold 64 × 256 accumulators. A
// consumer's rows are exactly one token block of the format, so packing needs no other warpgroup.
// Persistent: grid = clusters that fit at once.
#include "union.cuh"
#include "wgmma.cuh"

namespace {
constexpr int tile_m = 128, tile_n = tile_neurons, tile_k = 64, stages = 4, cluster = 2;
constexpr int bytes_a = tile_m * tile_k * 2, bytes_b = tile_n * tile_k * 2;
constexpr int group_m = 8;  // cluster rows that walk over all of N together: x stays in L2

struct Shared {
  bf16 a[stages][tile_m * tile_k];
  bf16 b[stages][tile_n * tile_k];
  uint32 fired[2][2][4][8];  // [consumer][tile parity][warp][column % 8]
  uint64 full[stages], empty[stages];
};

struct Tile {
  int m, n;  // first token and neuron of this block
};

__device__ __forceinline__ Tile tile_of(int index, int tiles_m, int tiles_n, uint32 rank) {
  const int per_group = group_m * tiles_n;
  const int first = index / per_group * group_m;
  const int rows = min(group_m, tiles_m - first);
  const int within = index % per_group;
  return {(first + within % rows) * tile_m * cluster + static_cast<int>(rank) * tile_m,
          within / rows * tile_n};
}

__device__ void produce(Shared& shared, const TensorMap& x, const TensorMap& w, int tiles_m,
                        int tiles_n, int steps) {
  const uint32 rank = cluster_rank();
  int it = 0;
  for (int index = blockIdx.x / cluster; index < tiles_m * tiles_n; index += gridDim.x / cluster) {
    const Tile tile = tile_of(index, tiles_m, tiles_n, rank);
    for (int step = 0; step < steps; ++step, ++it) {
      const int stage = it % stages;
      barrier_wait(&shared.empty[stage], (it / stages & 1) ^ 1);
      barrier_arrive_expect(&shared.full[stage], bytes_a + bytes_b);
      tma_load(shared.a[stage], x, &shared.full[stage], step * tile_k, tile.m);
      const int half = rank * (tile_n / cluster);
      tma_load_multicast(shared.b[stage] + half * tile_k, w, &shared.full[stage], step * tile_k,
                         tile.n + half, (1 << cluster) - 1);
    }
  }
}

// FATReLU: what is not above the threshold becomes zero. NaN passes, as through a dense relu.
__device__ __forceinline__ void cut(float (&d)[128], float threshold) {
#pragma unroll
  for (int i = 0; i < 128; ++i)
    if (d[i] <= threshold) d[i] = 0.0f;
}

// Adds the bias; rows past M become -inf, for they must not fire.
__device__ __forceinline__ void add_bias(float (&d)[128], const bf16* bias, int column, int n,
                                         int row, int m) {
  constexpr int minus_infinity = 0xff800000;
  const float upper = row < m ? 0.0f : __int_as_float(minus_infinity);
  const float lower = row + 8 < m ? 0.0f : __int_as_float(minus_infinity);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int at = column + 8 * j;
    const uint32 pair = at < n ? *reinterpret_cast<const uint32*>(bias + at) : 0;
    d[4 * j] += bf16_low(pair) + upper;
    d[4 * j + 1] += bf16_high(pair) + upper;
    d[4 * j + 2] += bf16_low(pair) + lower;
    d[4 * j + 3] += bf16_high(pair) + lower;
  }
}

// bf16 pairs of relu(d), and for columns 8j + 2(t%4) and the next a word each whose bit j says
// whether any of this thread's two rows fires there.
__device__ __forceinline__ void relu_and_flags(const float (&d)[128], uint32 (&pair)[64],
                                               uint32 (&flags)[2]) {
  uint32 octets[4];
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    uint32 bits = 0;
#pragma unroll
    for (int j = 8 * group; j < 8 * group + 8; ++j) {
      pair[2 * j] = pack_bf16_relu(d[4 * j], d[4 * j + 1]);
      pair[2 * j + 1] = pack_bf16_relu(d[4 * j + 2], d[4 * j + 3]);
      // A half of at most 0x7fff carries into its top bit exactly where it is not zero.
      const uint32 nonzero = ((pair[2 * j] | pair[2 * j + 1]) + 0x7fff7fffu) & 0x80008000u;
      bits = bits >> 1 | nonzero;
    }
    octets[group] = bits;  // low column in byte 1, high column in byte 3
  }
  const uint32 low01 = __byte_perm(octets[0], octets[1], 0x7351);
  const uint32 low23 = __byte_perm(octets[2], octets[3], 0x7351);
  flags[0] = __byte_perm(low01, low23, 0x5410);
  flags[1] = __byte_perm(low01, low23, 0x7632);
}

// Lane l gets the word of column 8j + l/4: its bit j says whether any of the 64 tokens fires.
__device__ __forceinline__ uint32 fired_columns(uint32 (&flags)[2], uint32 (&shared_fired)[4][8],
                                                uint32 barrier) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) flags[b] |= __shfl_xor_sync(~0u, flags[b], step);
    if (lane < 4) shared_fired[warp][2 * lane + b] = flags[b];
  }
  named_barrier(barrier, 128);
  uint32 fired = 0;
#pragma unroll
  for (int other = 0; other < 4; ++other) fired |= shared_fired[other][lane / 4];
  return fired;
}

// Writes the union's members and their columns: 8 neurons at a time, those without any skipped.
__device__ __forceinline__ void pack(const uint32 (&pair)[64], uint32 fired, uint32* count,
                                     unsigned char* neuron, bf16* value) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // Members are ordered by column % 8, then column / 8: a lane needs no other lane's word.
  const uint32 own = __popc(fired);
  uint32 place = own;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    const uint32 before = __shfl_up_sync(~0u, place, step);
    if (lane >= step) place += before;
  }
  if (threadIdx.x % 128 == 31) *count = place;
  place -= own;
  neuron += place;
  bf16* column = value + place * block_tokens + 16 * warp + 4 * (lane % 4);
  const uint32 any = __reduce_or_sync(~0u, fired);
  const bool lists = warp == 0 && lane % 4 == 0;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    if (!(any >> j & 1)) continue;
    // Transposed, a lane has one neuron's values of two neighbouring tokens.
    const uint32 upper = transpose_8x8(pair[2 * j]);
    const uint32 lower = transpose_8x8(pair[2 * j + 1]);
    if (fired >> j & 1) {
      *reinterpret_cast<uint2*>(column) = make_uint2(upper, lower);
      if (lists) *neuron = static_cast<unsigned char>(8 * j + lane / 4);
      column += block_tokens;
      neuron += 1;
    }
  }
}

__device__ void consume(Shared& shared, int m, int n, int tiles_m, int tiles_n, int steps,
                        float threshold, const bf16* bias, uint32* count, unsigned char* neuron,
                        bf16* value) {
  const int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const uint32 rank = cluster_rank();
  float d[128];
  int it = 0, parity = 0;
  for (int index = blockIdx.x / cluster; index < tiles_m * tiles_n; index += gridDim.x / cluster) {
    for (int step = 0; step < steps; ++step, ++it) {
      const int stage = it % stages;
      barrier_wait(&shared.full[stage], it / stages & 1);
      wgmma_begin();
      const uint32 a = smem_address(shared.a[stage] + consumer * 64 * tile_k);
      const uint32 b = smem_address(shared.b[stage]);
#pragma unroll
      for (int k = 0; k < tile_k / 16; ++k)
        wgmma_n256<0, 0>(d, operand(a + 32 * k, 0, 1024), operand(b + 32 * k, 0, 1024),
                         step > 0 || k > 0);
      wgmma_commit();
      // The products of the step before have read their stage: both blocks may fill it again.
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % 128 < cluster)
        barrier_arrive_remote(&shared.empty[(it - 1) % stages], threadIdx.x % 128);
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 < cluster)
      barrier_arrive_remote(&shared.empty[(it - 1) % stages], threadIdx.x % 128);

    const Tile tile = tile_of(index, tiles_m, tiles_n, rank);
    const int first = tile.m + consumer * 64;
    if (bias != nullptr)
      add_bias(d, bias, tile.n + 2 * (lane % 4), n, first + threadIdx.x / 32 % 4 * 16 + lane / 4, m);
    if (threshold > 0.0f) cut(d, threshold);
    uint32 pair[64], flags[2];
    relu_and_flags(d, pair, flags);
    const uint32 fired = fired_columns(flags, shared.fired[consumer][parity], 1 + consumer);
    parity ^= 1;
    if (first < m) {
      const uint64 place = static_cast<uint64>(first / block_tokens) * tiles_n + tile.n / tile_n;
      pack(pair, fired, count + place, neuron + place * tile_n,
           value + place * tile_n * block_tokens);
    }
  }
}
}  // namespace

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(384, 1)
    gate_union(const __grid_constant__ TensorMap x_MK, const __grid_constant__ TensorMap w_NK,
               const bf16* bias_N, int m, int n, int k, float threshold, uint32* count,
               unsigned char* neuron, bf16* value, uint32* control) {
  extern __shared__ unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(raw) + 1023) & ~1023ull);
  const int tiles_m = (m + tile_m * cluster - 1) / (tile_m * cluster);
  const int tiles_n = (n + tile_n - 1) / tile_n;
  const int steps = (k + tile_k - 1) / tile_k;
  if (blockIdx.x == 0 && threadIdx.x < 16) control[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], 2 * cluster);
    }
    barrier_init_fence();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    registers_decrease<40>();
    if (threadIdx.x == 0) produce(shared, x_MK, w_NK, tiles_m, tiles_n, steps);
  } else {
    registers_increase<232>();
    consume(shared, m, n, tiles_m, tiles_n, steps, threshold, bias_N, count, neuron, value);
  }
  cluster_sync();  // no block leaves while the other may still write into it
}

extern "C" __device__ const uint32 gate_union_shared_bytes = sizeof(Shared) + 1024;
