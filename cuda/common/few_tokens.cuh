// Products of up to 64 tokens with rows of a weight matrix, x · Wᵀ: bound by reading the weights.
//
// k is divided among the warps of a block, 64 bytes of a row at a time; their sums are added in shared
// memory, in a fixed order.
//
// Weights are the 16-row operand of mma.sync, tokens the 8-column one. The order of k does not change
// a product, so a lane copies 16 contiguous bytes of a row: of 32 k, lane l has 8(l%4) and the next 7
// in rows l/4 and l/4 + 8, and the same k of token l/4. No lane reads what another one copied: each
// waits for its own cp.async alone, and a block always has 64 KB of copies in flight.
//
// Weights in e4m3 have half the bytes: of 64 k, a lane has 16(l%4) and the next 15. They become elements
// in registers, which is exact on every GPU, and the product is multiplied by the row's scale. x stays as
// it is: quantised, it would not save a byte that matters.
#pragma once
#include "common/decode.cuh"

// The weights that a source with SPARSELLM_E4M3 reads.
#ifdef SPARSELLM_E4M3
using stored_weight = unsigned char;
#else
using stored_weight = element;
#endif

constexpr int round_pairs = num_warps;  // (tile, octet)s whose sums are added up at a time
static_assert(tile_rows == 16, "the rows of an mma; two lanes add up each");
static_assert(round_pairs % (max_decode_tokens / 8) == 0, "a round has whole tiles");

struct ProductMemory {
  uint4 ring[num_warps][slots][2][32];          // [rows l/4 or l/4 + 8][lane]
  float4 sums[num_warps][round_pairs][2 * 16];  // [share of k][tile, octet][row, half of the octet]
};

// The 16 bytes that a lane copies are one part of 8 elements, or two parts of e4m3 (unsigned char).
template <typename Weight>
constexpr int num_parts = 2 / sizeof(Weight);
template <typename Weight>
constexpr int chunk_of = 32 * num_parts<Weight>;  // numbers of a row that four lanes copy

// Tiles whose sums a warp holds at a time; x is read once for all of them.
template <int octets>
constexpr int max_tiles = octets <= 2 ? 8 : octets == 4 ? 4 : 3;

template <int octets>
using Sums = float[max_tiles<octets>][octets][4];

struct FewTokens {
  const element* x;
  uint32 m, k;
};

// The rows of one of the products: consecutive ones, or those that a list in shared memory names.
template <typename Weight>
struct Rows {
  const Weight* w;
  const float* scale;     // of each row, if it is of e4m3
  const element* bias;    // or null
  const uint16* list;  // or null
  uint32 first;
  uint32 num;  // never 0

  __device__ __forceinline__ uint32 at(uint32 i) const {
    return list == nullptr ? first + i : list[i];
  }
  __device__ __forceinline__ float times(uint32 i) const {
    if constexpr (sizeof(Weight) == 1) return i < num ? scale[at(i)] : 0.0f;
    return 1.0f;
  }
  __device__ __forceinline__ float add(uint32 i) const {
    return bias != nullptr && i < num ? element_low(bias[at(i)]) : 0.0f;
  }
};

// A warp's share of k: chunks 2w and 2w + 1, then every 16th after each. Together the warps read 1 KB
// of a row at a time, and each warp both halves of its 128-byte lines.
__device__ __forceinline__ uint32 first_chunk() { return threadIdx.x / 32 * 2; }
__device__ __forceinline__ uint32 next_chunk(uint32 chunk) {
  return chunk % 2 == 0 ? chunk + 1 : chunk + 2 * num_warps - 1;
}

// This lane's copies, in the order of use: one chunk of up to `max_tiles` tiles, then the next chunk;
// after the last one the next tiles.
template <typename Weight, int octets>
struct Copies {
  static constexpr int chunk_k = chunk_of<Weight>, lane_k = chunk_k / 4;
  const Rows<Weight>& rows;
  const uint32 k, ring;  // address of this lane's 16 bytes
  const Weight* const w;   // this lane's column
  uint32 num_tiles, tiles, first_tile = 0, tile = 0, chunk = first_chunk(), slot = 0;
  const Weight* from[2];
  bool present[2];

  __device__ __forceinline__ Copies(const ProductMemory& shared, const Rows<Weight>& rows, uint32 k)
      : rows(rows),
        k(k),
        ring(smem_address(&shared.ring[threadIdx.x / 32][0][0][threadIdx.x % 32])),
        w(rows.w + threadIdx.x % 4 * lane_k) {
    num_tiles = chunk * chunk_k < k ? (rows.num + tile_rows - 1) / tile_rows : 0;
    tiles = min(max_tiles<octets>, num_tiles);
    point();
#pragma unroll 1
    for (int ahead = 0; ahead < slots; ++ahead) next();
  }

  __device__ __forceinline__ void point() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 row = (first_tile + tile) * tile_rows + 8 * i + threadIdx.x % 32 / 4;
      present[i] = row < rows.num;
      from[i] = w + static_cast<uint64>(rows.at(min(row, rows.num - 1))) * k;
    }
  }

  // Copies one tile of one chunk, if any is left. Always closes a group: `copy_wait` counts groups.
  __device__ __forceinline__ void next() {
    if (first_tile < num_tiles) {
      const uint32 at = chunk * chunk_k;
      const bool inside = at + threadIdx.x % 4 * lane_k < k;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy16_async(ring + (slot * 2 + i) * sizeof(ProductMemory::ring[0][0][0]), from[i] + at,
                     inside && present[i] ? 16 : 0);
      slot = (slot + 1) % slots;
      advance();
    }
    copy_commit();
  }

  __device__ __forceinline__ void advance() {
    if (++tile == tiles) {
      tile = 0;
      chunk = next_chunk(chunk);
      const bool same_tiles = chunk * chunk_k < k;
      if (same_tiles && tiles == 1) return;
      if (!same_tiles) {
        chunk = first_chunk();
        first_tile += tiles;
        tiles = min(max_tiles<octets>, num_tiles - first_tile);
      }
    }
    point();
  }
};

// Two e4m3 numbers, in bytes 1 and 3 of `pair`, as elements, which hold them exactly: their bits, moved
// to an element's positions, stand for the number times a power of two.
__device__ __forceinline__ uint32 as_elements(uint32 pair) {
#ifdef SPARSELLM_FP16
  constexpr uint32 shift = 1, power = 0x5c005c00u;  // 2^8
#else
  constexpr uint32 shift = 4, power = 0x7b807b80u;  // 2^120
#endif
  const uint32 moved = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> shift;
  uint32 exact;
  asm("fma.rn." ELEMENT "x2 %0, %1, %2, %3;" : "=r"(exact) : "r"(moved), "r"(power), "r"(0x80008000u));
  return exact;
}

// What a lane has copied, as pairs of elements.
template <typename Weight>
struct Pairs {
  uint32 pair[4 * num_parts<Weight>];

  __device__ __forceinline__ explicit Pairs(uint4 copied) {
    const uint32 words[4] = {copied.x, copied.y, copied.z, copied.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (sizeof(Weight) == 1) {
        pair[2 * i] = as_elements(__byte_perm(words[i], 0, 0x1404));
        pair[2 * i + 1] = as_elements(__byte_perm(words[i], 0, 0x3424));
      } else {
        pair[i] = words[i];
      }
  }
};

// This lane's part of a chunk of x, of all octets; zeros past M and K.
template <int octets, int parts>
__device__ __forceinline__ void load_tokens(uint4 (&to)[octets][parts], const FewTokens& p,
                                            uint32 chunk) {
  const uint32 lane = threadIdx.x % 32, first = (chunk * 4 + lane % 4) * 8 * parts;
#pragma unroll
  for (int octet = 0; octet < octets; ++octet)
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const uint32 token = octet * 8 + lane / 4, at = first + 8 * part;
      to[octet][part] = make_uint4(0, 0, 0, 0);
      const element* from = p.x + static_cast<uint64>(token) * p.k + at;
      // Not __ldg: the previous kernel's results are not constant for as long as this one runs.
      if (token < p.m && at < p.k) to[octet][part] = *reinterpret_cast<const uint4*>(from);
    }
}

// Adds this warp's share of k to the sums of the `tiles` tiles whose copies come next.
template <int octets, typename Weight>
__device__ __forceinline__ void multiply(const ProductMemory& shared, Copies<Weight, octets>& copies,
                                         uint32& slot, const FewTokens& p, int tiles,
                                         Sums<octets>& d) {
  constexpr int parts = num_parts<Weight>, chunk_k = chunk_of<Weight>;
  constexpr bool loads_ahead = octets * parts <= 8;  // there are no registers for more
  const int lane = threadIdx.x % 32;
  uint4 ahead[octets][parts];
  if constexpr (loads_ahead) load_tokens(ahead, p, first_chunk());
#pragma unroll 1
  for (uint32 chunk = first_chunk(); chunk * chunk_k < p.k; chunk = next_chunk(chunk)) {
    uint4 x[octets][parts];
    if constexpr (loads_ahead) {
#pragma unroll
      for (int octet = 0; octet < octets; ++octet)
#pragma unroll
        for (int part = 0; part < parts; ++part) x[octet][part] = ahead[octet][part];
      load_tokens(ahead, p, next_chunk(chunk));
    } else {
      load_tokens(x, p, chunk);
    }
#pragma unroll
    for (int tile = 0; tile < max_tiles<octets>; ++tile) {
      if (tile >= tiles) break;
      copy_wait<slots - 1>();
      const auto& own = shared.ring[threadIdx.x / 32][slot];
      const Pairs<Weight> upper(own[0][lane]), lower(own[1][lane]);
      slot = (slot + 1) % slots;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const uint32 *u = upper.pair + 4 * part, *l = lower.pair + 4 * part;
        const uint32 first[4] = {u[0], l[0], u[1], l[1]}, second[4] = {u[2], l[2], u[3], l[3]};
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
          mma(d[tile][octet], first, x[octet][part].x, x[octet][part].y);
          mma(d[tile][octet], second, x[octet][part].z, x[octet][part].w);
        }
      }
      copies.next();  // after the products, which have read the slot that it overwrites
    }
  }
}

// Where a thread adds up sums: its warp has one tile and octet of a round, two lanes a row.
template <int octets>
struct Place {
  static constexpr int round_tiles = round_pairs / octets;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int tile = warp / octets, octet = warp % octets;  // tile of the round
  int row = lane / 2, first_token = octet * 8 + lane % 2 * 4;

  // This thread's four values in row i of `value`.
  __device__ __forceinline__ uint2* in(element* value, uint32 i) const {
    return reinterpret_cast<uint2*>(value + i * (8 * octets) + first_token);
  }
};

// The four sums of this thread's place; `first` is the first tile of the round in `d`.
template <int octets>
__device__ __forceinline__ float4 add_up(ProductMemory& shared, const Sums<octets>& d, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int tile = 0; tile < max_tiles<octets>; ++tile)
    if (tile / Place<octets>::round_tiles * Place<octets>::round_tiles == first) {
#pragma unroll
      for (int octet = 0; octet < octets; ++octet) {
        const int pair = tile % Place<octets>::round_tiles * octets + octet;
        float2* to = reinterpret_cast<float2*>(shared.sums[warp][pair]) + lane;
        const float(&own)[4] = d[tile][octet];
        to[0] = make_float2(own[0], own[1]);
        to[32] = make_float2(own[2], own[3]);
      }
    }
  __syncthreads();
  float4 sum = shared.sums[0][warp][lane];
#pragma unroll
  for (int share = 1; share < num_warps; ++share) add_share(sum, shared.sums[share][warp][lane]);
  return sum;
}

// Multiplies all rows that `copies` copies. `take(d, first, first_row)` is called for each round of
// tiles, by all threads: `first` is the round's first tile in the sums `d`, `first_row` its first row.
template <typename Weight, int octets, typename Take>
__device__ __forceinline__ void for_each_round(const ProductMemory& shared,
                                               Copies<Weight, octets>& copies,
                                               const Rows<Weight>& rows, const FewTokens& p,
                                               const Take& take) {
  constexpr int tiles_at_once = max_tiles<octets>, round_tiles = Place<octets>::round_tiles;
  uint32 slot = 0;
#pragma unroll 1
  for (uint32 row = 0; row < rows.num; row += tiles_at_once * tile_rows) {
    const int tiles = min(tiles_at_once, (rows.num - row + tile_rows - 1) / tile_rows);
    Sums<octets> d = {};
    multiply<octets>(shared, copies, slot, p, tiles, d);
#pragma unroll
    for (int first = 0; first < tiles_at_once; first += round_tiles) {
      if (first >= tiles) break;
      take(d, first, row + first * tile_rows);
    }
  }
}
