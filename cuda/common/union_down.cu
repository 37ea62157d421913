// union_down: y = h · W + b, h in the union format, W neuron by neuron: W_downᵀ as `nn.Linear` stores it
// (an architecture's down.cuh says how).
#include "down.cuh"

namespace {
struct UnionDown {
  const uint32* entry;
  const element *value, *w;
  int tiles_n;

  __device__ uint64 base(int block) const {
    return static_cast<uint64>(block) * tiles_n * tile_neurons;
  }
  static constexpr bool rare = false;
  static constexpr int max_sources = 1;

  __device__ int num_sources() const { return 1; }
  __device__ const uint32* members(int block) const { return entry + base(block); }
  __device__ uint32 neuron(uint32 member) const { return entry_neuron(member); }
  __device__ const element* columns(int, int block, int) const {
    return value + base(block) * block_tokens;
  }
  __device__ uint32 place(uint32 member, int) const { return entry_slot(member) * block_tokens; }
  __device__ const element* weights(int) const { return w; }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    union_down(const element* w_NK, const element* bias_K, int m, int k, int tiles_n,
               const uint32* entry, const uint2* order, const uint2* split, uint32* arrived,
               float* sums, uint32* control, const element* value, const int* token_M,
               element* y_MK) {
  const SumWork work{order, split, arrived, sums, control};
  run(UnionDown{entry, value, w_NK, tiles_n}, bias_K, m, k, work, token_M, y_MK);
}
