// union_up: h = gate * (x · W_upᵀ) on the union format, in place of the gate.
//
// A work unit is 64 tokens × 256 entries of their block's union; the rows of W_up that the entries
// name are gathered with cp.async, 64 k at a time, while TMA brings x. Each multiplying warpgroup
// holds 64 tokens × 128 entries.
#include "gather.cuh"

namespace {
constexpr int tile_k = 64, stages = 5, lag = 3, unit_entries = 256;
constexpr int bytes_x = block_tokens * tile_k * 2;

struct Shared {
  bf16 x[stages][block_tokens * tile_k];
  bf16 w[stages][unit_entries * tile_k];
  uint64 full[stages], empty[stages];
};

__device__ void gather(Shared& shared, const TensorMap& x, const bf16* w, int k, int steps,
                       int tiles_n, const uint32* entry, const uint32* total, const uint32* unit,
                       int num_units) {
  constexpr int rows = unit_entries * 8 / gather_threads;  // 16-byte chunks a thread and step
  const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
  GatherRing<stages, lag> ring{shared.full, shared.empty};
  for (int index = blockIdx.x; index < num_units; index += gridDim.x) {
    const int block = unit[index] >> 16, start = (unit[index] & 0xffffu) * unit_entries;
    const int entries = total[block] - start;
    const uint32* own = entry + static_cast<uint64>(block) * tiles_n * tile_neurons + start;
    const bf16* source[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = first_row + i * (gather_threads / 8);
      source[i] = row < entries ? w + static_cast<uint64>(entry_neuron(own[row])) * k + chunk * 8
                                : nullptr;
    }
    for (int step = 0; step < steps; ++step) {
      const int stage = ring.acquire();
      if (threadIdx.x == 0) {
        barrier_arrive_expect(&shared.full[stage], bytes_x);
        tma_load(shared.x[stage], x, &shared.full[stage], step * tile_k, block * block_tokens);
      }
      const uint32 to = smem_address(shared.w[stage]);
      const bool inside = step * tile_k + chunk * 8 < k;
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        const bool present = inside && source[i] != nullptr;
        copy16_async(to + swizzled(first_row + i * (gather_threads / 8), chunk),
                     present ? source[i] + step * tile_k : w, present ? 16 : 0);
      }
      ring.publish();
    }
  }
  ring.flush();
}

__device__ void multiply(Shared& shared, int steps, int tiles_n, const bf16* bias,
                         const uint32* entry, const uint32* total, const uint32* unit,
                         int num_units, bf16* value) {
  const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float d[64];
  int it = 0;
  for (int index = blockIdx.x; index < num_units; index += gridDim.x) {
    for (int step = 0; step < steps; ++step, ++it) {
      const int stage = it % stages;
      barrier_wait(&shared.full[stage], it / stages & 1);
      wgmma_begin();
      const uint32 a = smem_address(shared.x[stage]);
      const uint32 b = smem_address(shared.w[stage] + consumer * 128 * tile_k);
#pragma unroll
      for (int k = 0; k < tile_k / 16; ++k)
        wgmma_n128<0, 0>(d, operand(a + 32 * k, 0, 1024), operand(b + 32 * k, 0, 1024),
                         step > 0 || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[(it - 1) % stages]);
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[(it - 1) % stages]);

    const int block = unit[index] >> 16, start = (unit[index] & 0xffffu) * unit_entries;
    const int entries = total[block] - start;
    const uint64 base = static_cast<uint64>(block) * tiles_n * tile_neurons;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int own = consumer * 128 + 8 * j + lane / 4;
      const uint32 upper = transpose_8x8(pack_bf16(d[4 * j], d[4 * j + 1]));
      const uint32 lower = transpose_8x8(pack_bf16(d[4 * j + 2], d[4 * j + 3]));
      if (own < entries) {
        const uint32 member = entry[base + start + own];
        const float add = bias == nullptr ? 0.0f : bf16_low(bias[entry_neuron(member)]);
        uint32* column =
            reinterpret_cast<uint32*>(value + (base + entry_slot(member)) * block_tokens) +
            8 * warp + lane % 4;
        const uint32 g0 = column[0], g1 = column[4];
        column[0] = pack_bf16(bf16_low(g0) * (bf16_low(upper) + add),
                              bf16_high(g0) * (bf16_high(upper) + add));
        column[4] = pack_bf16(bf16_low(g1) * (bf16_low(lower) + add),
                              bf16_high(g1) * (bf16_high(lower) + add));
      }
    }
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    union_up(const __grid_constant__ TensorMap x_MK, const bf16* w_NK, const bf16* bias_N, int k,
             int tiles_n, const uint32* entry, const uint32* total, const uint32* unit,
             const uint32* num_units, bf16* value) {
  extern __shared__ unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(raw) + 1023) & ~1023ull);
  const int steps = (k + tile_k - 1) / tile_k, units = *num_units;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(&shared.full[stage], gather_threads + 1);
      barrier_init(&shared.empty[stage], 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < gather_threads) {
    registers_decrease<120>();
    gather(shared, x_MK, w_NK, k, steps, tiles_n, entry, total, unit, units);
  } else {
    registers_increase<192>();
    multiply(shared, steps, tiles_n, bias_N, entry, total, unit, units, value);
  }
}

extern "C" __device__ const uint32 union_up_shared_bytes = sizeof(Shared) + 1024;
