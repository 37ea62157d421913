// gate_twell: relu(x · Wᵀ), kept as TwELL (common/twell.cuh) instead of a dense M × N matrix
// (sm90/gate.cuh says how).
#include "common/twell.cuh"
#include "sm90/gate.cuh"

namespace {
// One warp packs a tile of 64 tokens: a lane walks along two neighbouring ones.
struct PackTwell {
  int m;
  uint32 row_words;
  uint32* word;

  // Where this lane's first token has its words of the tile.
  __device__ __forceinline__ uint64 place(int first, int tile, int) const {
    return static_cast<uint64>(first + 2 * (threadIdx.x % 32)) * row_words + tile * twell_width;
  }

  __device__ __forceinline__ void operator()(const PackedTile& out, int first, uint32 neuron,
                                             uint64 place) const {
    constexpr int ahead = 4;
    const uint32 lane = threadIdx.x % 32;
    const int tokens = m - first - 2 * static_cast<int>(lane);  // how many there are from its own on
    // A token past the last one stores nothing: its slots count as full.
    uint32 even_count = tokens > 0 ? 0 : twell_width, odd_count = tokens > 1 ? 0 : twell_width;
    uint32 *even = word + place, *odd = even + row_words;
    const uint32* values = reinterpret_cast<const uint32*>(out) + lane % 4;
    for (int start = 0; start < tile_n; start += 2 * ahead) {
#pragma unroll
      for (int half = 0; half < 2 * ahead; half += ahead) {
        uint32 pair[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i)
          pair[i] = values[(start + half + i) * 32 + (lane / 4 ^ (half + i)) * 4];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          const uint32 own = neuron + start + half + i;
          if ((pair[i] & 0x7fffu) != 0 && ++even_count < twell_width)
            even[even_count] = twell_word(pair[i] << 16, own);
          if ((pair[i] & 0x7fff0000u) != 0 && ++odd_count < twell_width)
            odd[odd_count] = twell_word(pair[i], own);
        }
      }
    }
    if (tokens > 0) even[0] = even_count;
    if (tokens > 1) odd[0] = odd_count;
  }
};
}  // namespace

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(gate_threads, 1)
    gate_twell(const __grid_constant__ TensorMap map_of_x, const __grid_constant__ TensorMap map_of_w,
               const element* bias_N, int m, int n, int k, float threshold, uint32* word,
               uint32* control, const float* x_scale_M, const float* w_scale_N) {
  const uint32 tiles = (n + tile_n - 1) / tile_n;
  run_gate(Tokens{map_of_x, nullptr, nullptr, m}, map_of_w, Scales{x_scale_M, w_scale_N}, bias_N, n, k,
           threshold, control, PackTwell{m, tiles * twell_width, word});
}
