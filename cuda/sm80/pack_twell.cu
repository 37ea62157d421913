// pack_twell: a dense gate, before its relu → TwELL (common/twell.cuh). What gate_twell does in its
// epilogue, for GPUs other than Hopper. A warp packs a row of a tile, eight neurons per lane.
#include "common/activation.cuh"
#include "common/twell.cuh"

namespace {
constexpr int threads = 256, warps = threads / 32;
}

extern "C" __global__ void __launch_bounds__(threads)
    pack_twell(const element* gate_MN, float threshold, int m, int n, uint32* word,
               uint32* control) {
  await_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < control_words) control[threadIdx.x] = 0;
  const int tiles = (n + tile_neurons - 1) / tile_neurons, lane = threadIdx.x % 32;
  const int item = blockIdx.x * warps + threadIdx.x / 32, row = item / tiles;
  if (row >= m) return;
  const int neuron = item % tiles * tile_neurons + 8 * lane;
  uint4 eight = make_uint4(0, 0, 0, 0);
  if (neuron < n)
    eight = *reinterpret_cast<const uint4*>(gate_MN + static_cast<uint64>(row) * n + neuron);
  const uint32 pair[4] = {activate(eight.x, threshold), activate(eight.y, threshold),
                          activate(eight.z, threshold), activate(eight.w, threshold)};
  uint32 own = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) own += ((pair[i] & 0xffffu) != 0) + (pair[i] >> 16 != 0);
  const uint32 through = sum_to_lane(own);
  uint32* to = word + static_cast<uint64>(item) * twell_width;
  uint32 slot = through - own + 1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32 high = i % 2 == 0 ? pair[i / 2] << 16 : pair[i / 2] & 0xffff0000u;
    if (high == 0) continue;
    if (slot < twell_width) to[slot] = twell_word(high, neuron + i);
    ++slot;
  }
  if (lane == 31) to[0] = through;
}
