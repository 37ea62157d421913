// gate_union: relu(x · Wᵀ), kept as the union format (common/union.cuh) instead of a dense M × N
// matrix (sm90/gate.cuh says how).
#include "common/union.cuh"
#include "sm90/gate.cuh"

namespace {
// One warp packs a tile of 64 tokens, which is a token block of the format: a lane looks at one neuron at a
// time.
struct PackUnion {
  int m;
  uint32* count;
  unsigned char* neuron;
  element* value;

  __device__ __forceinline__ uint64 place(int first, int tile, int tiles_n) const {
    return static_cast<uint64>(first / block_tokens) * tiles_n + tile;
  }

  __device__ __forceinline__ void operator()(const PackedTile& out, int first, int,
                                             uint64 place) const {
    const uint32 lane = threadIdx.x % 32;
    uint32 members = 0;
    for (int start = 0; start < tile_n && first < m; start += 32) {
      const uint4* column = out[start + lane];
      uint32 any = 0;
#pragma unroll 4
      for (int chunk = 0; chunk < 8; ++chunk) {
        const uint4 eight = column[chunk ^ lane % 8];
        any |= eight.x | eight.y | eight.z | eight.w;
      }
      const bool is_active = (any & 0x7fff7fffu) != 0;
      const uint32 active = __ballot_sync(~0u, is_active);
      if (is_active) {
        const uint32 own = members + __popc(active & ((1u << lane) - 1));
        neuron[place * tile_n + own] = static_cast<unsigned char>(start + lane);
        uint4* to = reinterpret_cast<uint4*>(value + (place * tile_n + own) * block_tokens);
#pragma unroll 2
        for (int chunk = 0; chunk < 8; chunk += 2) {  // into the order of token_at
          const uint4 upper = column[chunk ^ lane % 8], lower = column[(chunk + 1) ^ lane % 8];
          to[chunk] = make_uint4(upper.x, lower.x, upper.y, lower.y);
          to[chunk + 1] = make_uint4(upper.z, lower.z, upper.w, lower.w);
        }
      }
      members += __popc(active);
    }
    if (lane == 0 && first < m) count[place] = members;
  }
};
}  // namespace

extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(gate_threads, 1)
    gate_union(const __grid_constant__ TensorMap map_of_x, const element* x_MK, const int* token_M,
               const __grid_constant__ TensorMap map_of_w, const element* bias_N, int m, int n, int k,
               float threshold, uint32* count, unsigned char* neuron, element* value,
               uint32* control, const float* x_scale_M, const float* w_scale_N) {
  run_gate(Tokens{map_of_x, x_MK, token_M, m}, map_of_w, Scales{x_scale_M, w_scale_N}, bias_N, n, k,
           threshold, control, PackUnion{m, count, neuron, value});
}
