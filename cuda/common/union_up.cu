// union_up: h = gate * (x · W_upᵀ + b) on the union format, in place of the gate (an architecture's up.cuh
// says how). For training it also keeps x · W_upᵀ + b, compact (columns.cuh), and adds up |h|.
#include "up.cuh"

namespace {
// What training keeps; null pointers at inference.
struct Kept {
  const int* offset;
  element* up;
  uint32 capacity;  // columns of `up`
  float* l1;        // [blocks][tiles_n][part_warps]
};

struct UnionUp {
  static constexpr bool shifts = false;
  const uint32* entry;
  element* value;
  const element* bias;
  int tiles_n;
  Kept kept;
  bool relu;  // of up, before the product (dReLU)

  __device__ uint64 base(int block) const {
    return static_cast<uint64>(block) * tiles_n * tile_neurons;
  }
  __device__ float shift() const { return 0.0f; }
  __device__ const uint32* members(int block) const { return entry + base(block); }
  __device__ uint32 neuron(uint32 member) const { return entry_neuron(member); }

  __device__ __forceinline__ uint32 name(const Part& part, int i) const {
    return members(part.block)[part.start() + i];
  }
  template <typename Place>
  __device__ __forceinline__ uint2* column(int block, uint32 name, Place place) const {
    return column_part(value + base(block) * block_tokens, entry_slot(name), place);
  }
  template <typename Place>
  __device__ __forceinline__ void fetch(const Part& part, uint32 name, Place place, uint2& gate,
                                        uint2&) const {
    gate = *column(part.block, name, place);
  }

  template <typename Place>
  __device__ __forceinline__ float finish(const Part& part, int i, uint32 name, Place place, uint2 up,
                                          uint2 gate, uint2) const {
    if (bias != nullptr) {
      const float add = element_low(bias[entry_neuron(name)]);
      up = make_uint2(pack_elements(element_low(up.x) + add, element_high(up.x) + add),
                      pack_elements(element_low(up.y) + add, element_high(up.y) + add));
    }
    if (relu) up = make_uint2(relu_elements(up.x), relu_elements(up.y));
    const uint2 h = make_uint2(multiply_elements(gate.x, up.x), multiply_elements(gate.y, up.y));
    *column(part.block, name, place) = h;
    if (kept.l1 == nullptr) return 0.0f;
    const uint32 at = kept.offset[part.block] + part.start() + i;
    if (at < kept.capacity) *column_part(kept.up, at, place) = up;
    return sum_abs(h.x) + sum_abs(h.y);
  }

  __device__ __forceinline__ void end(const Part& part, int warp, float sum) const {
    if (kept.l1 == nullptr) return;
    sum = add_warp(sum);
    if (threadIdx.x % 32 == 0) kept.l1[(part.block * tiles_n + part.chunk) * part_warps + warp] = sum;
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    union_up(const __grid_constant__ TensorMap map_of_x, const element* x_MK, const int* token_M,
             int m, const element* w_NK, const element* bias_N, int k, int tiles_n,
             const uint32* entry, const uint2* unit, uint32* control, element* value,
             const int* offset, element* up, uint64 capacity, float* l1, int relu_up) {
  const Kept kept{offset, up, static_cast<uint32>(capacity), l1};
  const UnionUp op{entry, value, bias_N, tiles_n, kept, relu_up != 0};
  run(op, Tokens{map_of_x, x_MK, token_M, m}, w_NK, k, unit, control);
}
