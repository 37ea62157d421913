// dense_rows: the FFN of the rows that a sparse format does not hold, by dense products
// (common/dense_rows.cuh). It is launched with every call and ends at once if there are none.
//
// First a round's activations, then their product with W_downᵀ, in parts if there are few rows. Training
// keeps gate and up of the first `backup` rows, and counts which neurons are active, as hybrid_rows does
// for the other rows.
#include "common/dense_rows.cuh"

namespace {
constexpr int blocks_each = 2;

// What training keeps; null pointers at inference.
struct Kept {
  element *gate, *up;  // [backup][n]; gate: null without one
  uint32 backup;
  float* l1;        // [row blocks of 128][tiles of neurons][8 warps], zeroed
  uint32 *active_N, *active_bits;  // [token blocks][n / 32, rounded up]
  uint64* union_sum;
};

__device__ void activate(GemmShared& shared, const Sizes& size, const Weights& w, const element* x,
                         const Round& round, int tile, element* h, const Kept& kept) {
  float l1 = 0.0f;
  uint32 active[4] = {};  // this lane's rows for which a pair's first neuron is active; high half: second
  int neurons[4] = {-1, -1, -1, -1};
  const int lane = threadIdx.x % 32, bit_words = (size.n + 31) / 32;
  activations(shared, size, w, x, round, tile, [&](int row, int j, int neuron, uint32 gate,
                                                           uint32 up) {
    const bool there = row >= 0 && neuron >= 0;
    const uint32 product = w.second == nullptr ? gate : multiply_elements(gate, up);
    if (there) *reinterpret_cast<uint32*>(h + static_cast<uint64>(row) * size.n + neuron) = product;
    if (kept.l1 == nullptr) return;
    if (is_relu() || w.second != nullptr)
      l1 += fabsf(element_low(product)) + fabsf(element_high(product));
    else
      l1 += inverse(element_low(product)) + inverse(element_high(product));
    const uint32 slot = round.first + row;
    if (there && slot < kept.backup) {
      const uint64 at = static_cast<uint64>(slot) * size.n + neuron;
      if (kept.gate != nullptr) *reinterpret_cast<uint32*>(kept.gate + at) = gate;
      *reinterpret_cast<uint32*>(kept.up + at) = w.second == nullptr ? gate : up;
    }
    // Which neurons are active: each lane has a pair of neurons, each quad a row.
    const uint32 low = (gate & 0x7fffu) != 0, high = (gate & 0x7fff0000u) != 0;
    active[j] += low | high << 16;
    neurons[j] = neuron;
    uint32 bits = there ? (low | high << 1) << neuron % 32 : 0;
    bits |= __shfl_xor_sync(~0u, bits, 1);
    bits |= __shfl_xor_sync(~0u, bits, 2);
    if (lane % 4 == 0 && there && bits != 0) {
      uint32* word = kept.active_bits +
                     static_cast<uint64>(round.list[row] / block_tokens) * bit_words + neuron / 32;
      const uint32 fresh = bits & ~atomicOr(word, bits);
      if (fresh != 0) atomicAdd(kept.union_sum, static_cast<uint64>(__popc(fresh)));
    }
  });
  if (kept.l1 == nullptr) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) active[j] += __shfl_xor_sync(~0u, active[j], step);
    if (lane >= 4 || neurons[j] < 0) continue;
    if ((active[j] & 0xffffu) != 0) atomicAdd(kept.active_N + neurons[j], active[j] & 0xffffu);
    if (active[j] >> 16 != 0) atomicAdd(kept.active_N + neurons[j] + 1, active[j] >> 16);
  }
  l1 = add_warp(l1);
  const int tiles = (size.n + tile_width(w.second != nullptr) - 1) / tile_width(w.second != nullptr);
  const int block = round.first / gemm_tile + tile % round.blocks;
  if (lane == 0) kept.l1[(block * tiles + tile / round.blocks) * 8 + threadIdx.x / 32] = l1;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(gemm_threads, blocks_each)
    dense_rows(const element* x_MK, const element* first_NK, const element* b_first_N,
               const element* second_NK, const element* b_second_N, const element* down_NK,
               const element* b_down_K, float threshold, int relu_up, int n, int k,
               const uint32* list, uint32* control, int room, element* h, float* partial,
               const int* token, element* y_MK, element* gate, element* up, int backup, float* l1,
               uint32* active_N, uint32* active_bits, uint64* union_sum) {
  GemmShared& shared = dynamic_shared<GemmShared>();
  await_previous_kernel();
  const Sizes size{n, k};
  const Weights w{first_NK, b_first_N, second_NK, b_second_N, threshold, relu_up != 0};
  const Kept kept{gate, up, static_cast<uint32>(backup), l1, active_N, active_bits, union_sum};
  const uint32 count = control[num_overflowed];
  const uint32 neurons = tile_width(second_NK != nullptr);
  const uint32 first_tiles = (n + neurons - 1) / neurons;
  const uint32 second_tiles = (k + gemm_tile - 1) / gemm_tile;
  const bool one_round = count <= room;
  // Work of a full round; of the only one there may be more.
  const uint32 whole = one_round ? ~0u : room / gemm_tile * (first_tiles + second_tiles);
  while (count > 0) {
    const uint32 item = claim_item(shared, control + next_item), number = item / whole;
    if (number * room >= count) break;
    const Round round(list, count, room, number);
    const Split split(round.blocks * second_tiles, one_round);
    const auto store_y = [&](int row, int column, float low, float high) {
      const uint32 own = round.list[row];
      const uint64 to = token == nullptr ? own : token[own];
      *reinterpret_cast<uint32*>(y_MK + to * k + column) =
          pack_biased(low, high, b_down_K, column, k);
    };
    const RowsProduct down{size, round, split, partial, store_y};
    const uint32 before = number * whole, activated = before + round.blocks * first_tiles;
    const uint32 multiplied = activated + split.items(), end = multiplied + split.additions();
    if (item >= end) break;
    await_items(control + items_done, item < activated    ? before
                                      : item < multiplied ? activated
                                                          : multiplied);
    if (item < activated) {
      activate(shared, size, w, x_MK, round, item - before, h, kept);
    } else if (item < multiplied) {
      GemmSums d = {};
      down.multiply_item(shared, item - activated, h, down_NK, d);
      down.finish(item - activated, d);
    } else {
      down.add(item - multiplied);
    }
    finish_item(control + items_done);
  }
}

extern "C" __device__ const uint32 exported_blocks = blocks_each;
