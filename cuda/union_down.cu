// union_down: y = h · W_downᵀ, h in the union format; w_down_NK is stored neuron by neuron.
//
// A work unit is one block of 64 tokens × 512 output columns. It runs over the block's union, 32
// entries a stage: their h columns and the 1024-byte pieces of their weight rows are gathered with
// cp.async. Each multiplying warpgroup holds 64 tokens × 256 columns. Both operands are stored with
// k, the entry, as the slow index, which wgmma reads as "transposed".
#include "gather.cuh"

namespace {
constexpr int stage_entries = 32, stages = 6, unit_columns = 512, panel = 64;
constexpr int panel_bytes = stage_entries * panel * 2;

struct Shared {
  bf16 h[stages][stage_entries * block_tokens];
  bf16 w[stages][unit_columns / panel][stage_entries * panel];
  uint64 full[stages], empty[stages];
  UnitQueue queue;
};

// A warp copies every fourth row, its 1024 bytes in two halves.
__device__ void gather(Shared& shared, const bf16* w, uint32 k, int tiles_n, int units_k,
                       int blocks, const uint32* entry, const uint2* order, uint32* control,
                       const bf16* value) {
  const uint32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 h_row = threadIdx.x / 8, h_chunk = threadIdx.x % 8;
  // Rows 4i + warp, chunks `lane` and `lane` + 32: two patterns of the swizzle, by i's parity.
  const uint32 to_even = lane / 8 * panel_bytes + swizzled(warp, lane % 8);
  const uint32 to_odd = lane / 8 * panel_bytes + swizzled(warp + 4, lane % 8);
  const uint32 to_h = swizzled(h_row, h_chunk), row_bytes = 2 * k;
  GatherRing<stages> ring{shared.full, shared.empty};
  const auto look_up = [&](int index) { return order[index / units_k]; };
  UnitWalk walk(shared.queue, control + next_down, blocks * units_k, look_up);
  for (Unit unit; (unit = walk.next(look_up)).index >= 0;) {
    const int entries = unit.b;
    const uint32 column = unit.index % units_k * unit_columns + lane * 8;
    const uint64 base = static_cast<uint64>(unit.a) * tiles_n * tile_neurons;
    const char* from_w = reinterpret_cast<const char*>(w + column);
    const bf16* from_h = value + base * block_tokens + h_chunk * 8;
    const bool left = column < k, right = column + unit_columns / 2 < k;
    // Lane l keeps entry l of the stage; the next stage's are on their way meanwhile.
    const uint32* list = entry + base + lane;
    int remaining = entries - lane;
    uint32 next = remaining > 0 ? *list : 0;
    for (int present = entries; present > 0; present -= stage_entries) {
      const uint32 own = next;
      list += stage_entries;
      remaining -= stage_entries;
      next = remaining > 0 ? *list : 0;
      const int stage = ring.acquire();
      const uint32 stage_w = smem_address(shared.w[stage]);
#pragma unroll
      for (int i = 0; i < stage_entries / 4; ++i) {
        const int row = 4 * i + warp;
        const uint32 neuron = entry_neuron(__shfl_sync(~0u, own, row));
        const char* source = from_w + static_cast<uint64>(neuron) * row_bytes;
        const uint32 to = stage_w + (i % 2 == 0 ? to_even : to_odd) + i / 2 * 1024;
        copy16_async(to, source, left && row < present ? 16 : 0);
        copy16_async(to + 4 * panel_bytes, source + unit_columns,
                     right && row < present ? 16 : 0);
      }
      const uint32 stage_h = smem_address(shared.h[stage]) + to_h;
#pragma unroll
      for (int i = 0; i < stage_entries * 8 / gather_threads; ++i) {
        const int row = i * (gather_threads / 8) + h_row;
        const uint32 slot = entry_slot(__shfl_sync(~0u, own, row));
        copy16_async(stage_h + i * (gather_threads / 8) * 128, from_h + slot * block_tokens,
                     row < present ? 16 : 0);
      }
      ring.publish();
    }
  }
}

// Where 64 × 256 sums of a warpgroup go.
struct Output {
  bf16* y;
  const bf16* bias;  // or null
  int m, k, row, column;
};

template <typename Sum>
__device__ __forceinline__ void store(const Output& to, Sum sum) {
  const int row = to.row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  bf16* upper = to.y + static_cast<uint64>(row) * to.k;
  bf16* lower = upper + 8 * static_cast<uint64>(to.k);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int column = to.column + 8 * j + 2 * (threadIdx.x % 4);
    if (column >= to.k) continue;
    const uint32 add =
        to.bias == nullptr ? 0 : *reinterpret_cast<const uint32*>(to.bias + column);
    if (row < to.m)
      *reinterpret_cast<uint32*>(upper + column) =
          pack_bf16(sum(4 * j) + bf16_low(add), sum(4 * j + 1) + bf16_high(add));
    if (row + 8 < to.m)
      *reinterpret_cast<uint32*>(lower + column) =
          pack_bf16(sum(4 * j + 2) + bf16_low(add), sum(4 * j + 3) + bf16_high(add));
  }
}

__device__ void multiply(Shared& shared, int m, int k, int units_k,
                         const bf16* bias, bf16* y) {
  const int consumer = threadIdx.x / 128 - 1;
  float d[128];
  int it = 0;
  const auto look_up = [](int) { return make_uint2(0, 0); };
  UnitWalk walk(shared.queue, nullptr, 0, look_up);
  for (Unit unit; (unit = walk.next(look_up)).index >= 0;) {
    const int block = unit.a, entries = unit.b;
    const Output unit_y{y, bias, m, k, block * block_tokens,
                        unit.index % units_k * unit_columns + consumer * 256};
    if (entries == 0) {
      store(unit_y, [](int) { return 0.0f; });
      continue;
    }
    for (int first = 0; first < entries; first += stage_entries, ++it) {
      const int stage = it % stages;
      barrier_wait(&shared.full[stage], it / stages & 1);
      fence_async_proxy();
      wgmma_begin();
      const uint32 a = smem_address(shared.h[stage]);
      const uint32 b = smem_address(shared.w[stage][consumer * 4]);
#pragma unroll
      for (int s = 0; s < stage_entries / 16; ++s)
        wgmma_n256<1, 1>(d, operand(a + 2048 * s, 0, 1024),
                         operand(b + 2048 * s, panel_bytes, 1024), first > 0 || s > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (first > 0 && threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[(it - 1) % stages]);
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[(it - 1) % stages]);
    store(unit_y, [&](int i) { return d[i]; });
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    union_down(const bf16* w_NK, const bf16* bias_K, int m, int k, int tiles_n,
               const uint32* entry, const uint2* order, uint32* control, const bf16* value,
               bf16* y_MK) {
  extern __shared__ unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(raw) + 1023) & ~1023ull);
  const int units_k = (k + unit_columns - 1) / unit_columns;
  const int blocks = (m + block_tokens - 1) / block_tokens;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(&shared.full[stage], gather_threads);
      barrier_init(&shared.empty[stage], 2);
    }
    shared.queue.init();
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < gather_threads) {
    registers_decrease<88>();
    gather(shared, w_NK, k, tiles_n, units_k, blocks, entry, order, control, value);
  } else {
    registers_increase<208>();
    multiply(shared, m, k, units_k, bias_K, y_MK);
  }
}

extern "C" __device__ const uint32 union_down_shared_bytes = sizeof(Shared) + 1024;
