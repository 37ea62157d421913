// union_down: y = h · W + b, h in the union format, W neuron by neuron: W_downᵀ as `nn.Linear` stores
// it (down.cuh has how).
#include "sm90/down.cuh"

namespace {
struct UnionDown {
  const uint32* entry;
  const bf16 *value, *w;
  int tiles_n;

  __device__ uint64 base(int block) const {
    return static_cast<uint64>(block) * tiles_n * tile_neurons;
  }
  static constexpr bool rare = false;

  __device__ int num_sources() const { return 1; }
  __device__ const uint32* members(int block) const { return entry + base(block); }
  __device__ uint32 neuron(uint32 member) const { return entry_neuron(member); }
  __device__ const bf16* columns(int, int block, int) const {
    return value + base(block) * block_tokens;
  }
  __device__ uint32 place(uint32 member, int) const { return entry_slot(member) * block_tokens; }
  __device__ const bf16* weights(int) const { return w; }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    union_down(const bf16* w_NK, const bf16* bias_K, int m, int k, int tiles_n,
               const uint32* entry, const uint2* order, const uint2* split, uint32* arrived,
               float* sums, uint32* control, const bf16* value, const int* token_M, bf16* y_MK) {
  const Shares shares{order, split, arrived, sums, control};
  run(UnionDown{entry, value, w_NK, tiles_n}, bias_K, m, k, shares, token_M, y_MK);
}

extern "C" __device__ const uint32 union_down_shared_bytes = shared_bytes;
