// relu(x · Wᵀ) by wgmma, packed in the epilogue: shared by gate_union and gate_twell. x and W are elements,
// or with SPARSELLM_E4M3 numbers of e4m3 with a scale per token and per neuron: (x_scale x) · (w_scale W)ᵀ.
//
// x_MK, w_NK row-major. Block tile 128 tokens × 256 neurons × 128 bytes of k; two blocks form a
// cluster and share the weight tile: each loads half of it and multicasts it. Warp 0 is the producer and
// fills a ring of stages through TMA; where the tokens' rows are not contiguous, warps 0 and 3 gather
// them with cp.async. Two consumer warpgroups hold 64 tokens × 256 neurons each. A consumer stores its rounded tile in shared
// memory, neuron by neuron, and continues with the next while warp 1 or 2 packs it (H200, 16384 × 2048 ×
// 5632, 2.6% of neurons active, gate_union: 0.501 ms, the time of cuBLAS without packing; 0.522 with the
// packing done by the consumers). Persistent: the grid is as many clusters as fit at once.
//
// A `Pack` is called by one warp with such a tile: `pack(out, first, neuron, place)`; `out` is
// [256 neurons][8 chunks of 8 tokens], chunk c of neuron n at c ^ n % 8; `first` is the first token,
// which may lie past the last one, `neuron` the first neuron; `place` is what `pack.place` returned.
#pragma once
#include "common/activation.cuh"
#include "common/tiles.cuh"
#include "sm90/hopper.cuh"
#include "sm90/wgmma.cuh"

namespace {
using namespace gate_tiles;
constexpr int bytes_a = tile_m * row_bytes, bytes_b = tile_n * row_bytes;
static_assert(row_bytes == swizzle_bytes);
static_assert(tile_m == num_consumers * 64 && tile_n == 256, "a consumer's products are m64n256");
static_assert(block_tokens == 64, "a consumer's tokens are a block of the union format");
static_assert(stages >= 2);
static_assert(bytes_a % swizzle_repeat == 0 && bytes_b % swizzle_repeat == 0, "stages are aligned");
static_assert(tile_n % cluster == 0 && bytes_b / cluster % swizzle_repeat == 0, "so are halves");
static_assert(tile_m <= 256 && tile_n / cluster <= 256, "rows of a box of TMA");
static_assert(bytes_a + bytes_b < 1 << 20, "bytes that an mbarrier counts");
static_assert(cluster <= 8, "larger clusters are not portable");
static_assert(registers_fit<producer_registers, consumer_registers>);

#ifdef SPARSELLM_E4M3
constexpr bool in_e4m3 = true;
#else
constexpr bool in_e4m3 = false;
#endif
constexpr int tile_k = in_e4m3 ? row_bytes : row_bytes / sizeof(element);
static_assert(row_bytes % 32 == 0, "a wgmma takes 32 bytes of k in either type");

// What x and W are to be multiplied by, row by row, if they are e4m3.
struct Scales {
  const float *x_M, *w_N;
};

struct Shared {
  unsigned char a[stages][bytes_a];
  unsigned char b[stages][bytes_b];
  uint4 out[num_consumers][tile_n][8];  // [consumer][neuron][8 tokens, chunk swizzled by neuron]
  uint64 full[stages], empty[stages];
  uint64 out_full[num_consumers], out_empty[num_consumers];
};
static_assert(fits<Shared>);
static_assert(sizeof(Shared::a) % swizzle_repeat == 0 && sizeof(Shared::b) % swizzle_repeat == 0,
              "what follows them is aligned, too");
static_assert(sizeof(Shared::out[0][0]) == block_tokens * sizeof(element));

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
      mbarrier_wait(&shared.empty[stage], (it / stages & 1) ^ 1);
      mbarrier_arrive_expect(&shared.full[stage], bytes_a + bytes_b);
      tma_load(shared.a[stage], x, &shared.full[stage], step * tile_k, tile.m);
      const int half = rank * (tile_n / cluster);
      tma_load_multicast(shared.b[stage] + half * row_bytes, w, &shared.full[stage],
                         step * tile_k, tile.n + half, (1 << cluster) - 1);
    }
  }
}

constexpr int token_threads = 64;  // warps 0 and 3
constexpr int token_copies = tile_m * 8 / token_threads;  // 16-byte chunks a thread and stage
static_assert(token_copies * token_threads == tile_m * (row_bytes / 16));
static_assert(token_threads == 8 * 8, "a thread's rows are 8 apart: all have the same swizzle");

// `produce` with gathered tokens, by warps 0 and 3. Past the last token the last one is read again; its
// results are cut off. k / 8 times the number of tokens is below 2³².
__device__ void produce_scattered(Shared& shared, const Tokens& tokens, const TensorMap& w,
                                  uint32 k, int tiles_m, int tiles_n, int steps) {
  const uint32 rank = cluster_rank();
  const int own = threadIdx.x / 96 * 32 + threadIdx.x % 32, chunk = own % 8, first_row = own / 8;
  const uint32 to_thread = first_row * row_bytes + ((chunk ^ first_row) << 4);  // swizzled; rows 8 apart
  int it = 0;
  for (int index = blockIdx.x / cluster; index < tiles_m * tiles_n; index += gridDim.x / cluster) {
    const Tile tile = tile_of(index, tiles_m, tiles_n, rank);
    uint32 from[token_copies];  // in chunks
#pragma unroll
    for (int i = 0; i < token_copies; ++i)
      from[i] = tokens.row_of[min(tile.m + first_row + 8 * i, tokens.m - 1)] * (k / 8) + chunk;
    for (int step = 0; step < steps; ++step, ++it) {
      const int stage = it % stages;
      mbarrier_wait(&shared.empty[stage], (it / stages & 1) ^ 1);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&shared.full[stage], bytes_b);
        const int half = rank * (tile_n / cluster);
        tma_load_multicast(shared.b[stage] + half * row_bytes, w, &shared.full[stage],
                           step * tile_k, tile.n + half, (1 << cluster) - 1);
      }
      const uint32 to = smem_address(shared.a[stage]) + to_thread;
      const uint4* x = reinterpret_cast<const uint4*>(tokens.x) + step * (tile_k / 8);
      const uint32 bytes = step * tile_k + chunk * 8 < k ? 16 : 0;
#pragma unroll
      for (int i = 0; i < token_copies; ++i) copy16_async(to + i * 8 * swizzle_bytes, x + from[i], bytes);
      copy_arrive(&shared.full[stage]);
    }
  }
}

// FATReLU: what is not above the threshold becomes zero, once it is rounded, as a dense model would
// compare it. NaN passes, as through a dense relu.
__device__ __forceinline__ void apply_threshold(float (&d)[128], float threshold) {
#pragma unroll
  for (int i = 0; i < 128; ++i)
    if (element_low(pack_elements(d[i], 0.0f)) <= threshold) d[i] = 0.0f;
}

__device__ __forceinline__ void add_bias(float (&d)[128], const element* bias, int column, int n) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int at = column + 8 * j;
    const uint32 pair = at < n ? *reinterpret_cast<const uint32*>(bias + at) : 0;
    d[4 * j] += element_low(pair);
    d[4 * j + 1] += element_high(pair);
    d[4 * j + 2] += element_low(pair);
    d[4 * j + 3] += element_high(pair);
  }
}

// `row`, `column`: this thread's first ones of `m` and `n`.
__device__ __forceinline__ void apply_scales(float (&d)[128], const Scales& scales, int row,
                                             int column, int m, int n) {
  const float upper = row < m ? scales.x_M[row] : 0.0f;
  const float lower = row + 8 < m ? scales.x_M[row + 8] : 0.0f;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int at = column + 8 * j;
    const float2 own = at < n ? *reinterpret_cast<const float2*>(scales.w_N + at) : float2{};
    d[4 * j] *= upper * own.x;
    d[4 * j + 1] *= upper * own.y;
    d[4 * j + 2] *= lower * own.x;
    d[4 * j + 3] *= lower * own.y;
  }
}

// Values past M or N must be zero; a bias, or NaN or infinity times the zeros that TMA fills in, could
// make them. `rows`, `columns`: how many there are from this thread's first ones on.
__device__ __forceinline__ void zero_out_of_range(float (&d)[128], int rows, int columns) {
#pragma unroll
  for (int i = 0; i < 128; ++i)
    if (i / 2 % 2 * 8 >= rows || i / 4 * 8 >= columns) d[i] = 0.0f;
}

// Stores the warp's part of the tile, after the activation and transposed: 16 tokens of every neuron.
__device__ __forceinline__ void store_tile(const float (&d)[128], uint4 (&out)[tile_n][8]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // Lane l names row l%8 of matrix l/8: neuron within an octet; matrices are octet, 8 tokens.
  const int neuron = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
  const uint32 to = smem_address(&out[neuron][chunk ^ neuron % 8]);
#pragma unroll
  for (int j = 0; j < 32; j += 2)
    store_transposed(to + j * 8 * swizzle_bytes, activated(pack_elements_relu(d[4 * j], d[4 * j + 1])),
                     activated(pack_elements_relu(d[4 * j + 2], d[4 * j + 3])),
                     activated(pack_elements_relu(d[4 * j + 4], d[4 * j + 5])),
                     activated(pack_elements_relu(d[4 * j + 6], d[4 * j + 7])));
}

using PackedTile = uint4[tile_n][8];

// A packing warp's walk through its consumer's tiles.
template <typename Pack>
__device__ void pack_tiles(Shared& shared, int consumer, int tiles_m, int tiles_n,
                           const Pack& pack) {
  const uint32 rank = cluster_rank();
  uint32 parity = 0;
  for (int index = blockIdx.x / cluster; index < tiles_m * tiles_n; index += gridDim.x / cluster) {
    const Tile tile = tile_of(index, tiles_m, tiles_n, rank);
    const int first = tile.m + consumer * block_tokens;
    const uint64 place = pack.place(first, tile.n / tile_n, tiles_n);
    mbarrier_wait(&shared.out_full[consumer], parity);
    pack(shared.out[consumer], first, tile.n, place);
    mbarrier_arrive(&shared.out_empty[consumer]);
    parity ^= 1;
  }
}

// `scattered`: the tokens come by cp.async.
template <bool scattered>
__device__ void consume(Shared& shared, int m, int n, int tiles_m, int tiles_n, int steps,
                        float threshold, const element* bias, const Scales& scales) {
  const int consumer = threadIdx.x / warpgroup_threads - 1, lane = threadIdx.x % 32;
  const uint32 rank = cluster_rank();
  float d[128];
  int it = 0;
  uint32 parity = 0;
  for (int index = blockIdx.x / cluster; index < tiles_m * tiles_n; index += gridDim.x / cluster) {
    for (int step = 0; step < steps; ++step, ++it) {
      const int stage = it % stages;
      mbarrier_wait(&shared.full[stage], it / stages & 1);
      if (scattered) fence_async_proxy();
      wgmma_begin();
      const uint32 a = smem_address(shared.a[stage] + consumer * 64 * row_bytes);
      const uint32 b = smem_address(shared.b[stage]);
#pragma unroll
      for (int k = 0; k < row_bytes / 32; ++k) {  // one wgmma in either type
        const uint64 of_a = operand(a + 32 * k), of_b = operand(b + 32 * k);
        if constexpr (in_e4m3)
          wgmma_n256_e4m3(d, of_a, of_b, step > 0 || k > 0);
        else
          wgmma_n256<0>(d, of_a, of_b, step > 0 || k > 0);
      }
      wgmma_commit();
      // The products of the step before have read their stage: both blocks may fill it again.
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % warpgroup_threads < cluster)
        mbarrier_arrive_remote(&shared.empty[(it - 1) % stages], threadIdx.x % warpgroup_threads);
    }
    wgmma_wait<0>();
    if (threadIdx.x % warpgroup_threads < cluster)
      mbarrier_arrive_remote(&shared.empty[(it - 1) % stages], threadIdx.x % warpgroup_threads);

    const Tile tile = tile_of(index, tiles_m, tiles_n, rank);
    const int first = tile.m + consumer * 64;
    const int row = first + threadIdx.x / 32 % 4 * 16 + lane / 4, column = tile.n + 2 * (lane % 4);
    // The scales are never null here; without the check ptxas 13.0 keeps sums in local memory.
    if (in_e4m3 && scales.x_M != nullptr) apply_scales(d, scales, row, column, m, n);
    if (bias != nullptr) add_bias(d, bias, column, n);
    if (first + block_tokens > m || tile.n + tile_n > n) zero_out_of_range(d, m - row, n - column);
    if (threshold > 0.0f) apply_threshold(d, threshold);
    mbarrier_wait(&shared.out_empty[consumer], parity ^ 1);
    store_tile(d, shared.out[consumer]);
    mbarrier_arrive(&shared.out_full[consumer]);
    parity ^= 1;
  }
}

// The body of a kernel of `gate_threads` threads, in clusters; zeroes `control`. Tokens in e4m3 are
// never scattered.
template <typename Pack>
__device__ __forceinline__ void run_gate(const Tokens& tokens, const TensorMap& w_NK,
                                         const Scales& scales, const element* bias_N, int n, int k,
                                         float threshold, uint32* control, const Pack& pack) {
  Shared& shared = swizzled_shared<Shared>();
  const int m = tokens.m, tiles_m = (m + tile_m * cluster - 1) / (tile_m * cluster);
  const int tiles_n = (n + tile_n - 1) / tile_n;
  const int steps = (k + tile_k - 1) / tile_k;
  const bool scattered = !in_e4m3 && tokens.row_of != nullptr;
  admit_next_kernel();
  await_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < control_words) control[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(&shared.full[stage], scattered ? 1 + token_threads : 1);
      mbarrier_init(&shared.empty[stage], num_consumers * cluster);
    }
    for (int consumer = 0; consumer < num_consumers; ++consumer) {
      mbarrier_init(&shared.out_full[consumer], warpgroup_threads);
      mbarrier_init(&shared.out_empty[consumer], 32);  // of the warp that packs
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  if (threadIdx.x < producer_threads) {
    registers_decrease<producer_registers>();
    const int warp = threadIdx.x / 32;
    if (warp == 1 || warp == 2)
      pack_tiles(shared, warp - 1, tiles_m, tiles_n, pack);
    else if (scattered)
      produce_scattered(shared, tokens, w_NK, k, tiles_m, tiles_n, steps);
    else if (threadIdx.x == 0)
      produce(shared, tokens.map, w_NK, tiles_m, tiles_n, steps);
  } else {
    registers_increase<consumer_registers>();
    if (scattered)
      consume<!in_e4m3>(shared, m, n, tiles_m, tiles_n, steps, threshold, bias_N, scales);
    else
      consume<false>(shared, m, n, tiles_m, tiles_n, steps, threshold, bias_N, scales);
  }
  cluster_sync();  // no block exits while the other may still write into its shared memory
}

constexpr int gate_threads = producer_threads + consumer_threads;
}  // namespace

extern "C" __device__ const uint32 exported_tokens = tile_m, exported_cluster = cluster,
                                   exported_shared_bytes = aligned_bytes<Shared>;
