// union_up: h = gate * (x · W_upᵀ) on the union format, in place of the gate.
//
// A work unit is 64 tokens × 256 entries of their block's union; the rows of W_up that the entries
// name are gathered with cp.async, 64 k at a time, while TMA brings x. Each multiplying warpgroup
// holds 64 tokens × 128 entries.
#include "gather.cuh"

namespace {
constexpr int tile_k = 64, stages = 5, unit_entries = 256;
constexpr uint32 none = 0xffffffffu;
constexpr int bytes_x = block_tokens * tile_k * 2;

struct Shared {
  bf16 x[stages][block_tokens * tile_k];
  bf16 w[stages][unit_entries * tile_k];
  uint64 full[stages], empty[stages];
  UnitQueue queue;
};

constexpr int rows = unit_entries * 8 / gather_threads;  // 16-byte chunks a thread and step
constexpr int row_step = gather_threads / 8, step_group = 4;

// Up to `step_group` stages. `whole`: every row is present and every k inside, which saves the
// predicates: four warps issue all copies, and their instructions are what the kernel waits for.
template <bool whole>
__device__ __forceinline__ void gather_steps(Shared& shared, RingPlace<stages>& place,
                                             const TensorMap& x, int block,
                                             const bf16* (&source)[rows], int entries, int step,
                                             int end, uint32 k) {
  const uint32 chunk = threadIdx.x % 8, to_thread = swizzled(threadIdx.x / 8, chunk);
#pragma unroll
  for (int ahead = 0; ahead < step_group; ++ahead, ++step) {
    if (!whole && step >= end) break;
    barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
    if (threadIdx.x == 0) {
      barrier_arrive_expect(&shared.full[place.stage], bytes_x);
      tma_load(shared.x[place.stage], x, &shared.full[place.stage], step * tile_k,
               block * block_tokens);
    }
    const uint32 to = smem_address(shared.w[place.stage]) + to_thread;
    const uint32 bytes = whole || step * tile_k + chunk * 8 < k ? 16 : 0;
#pragma unroll
    for (int i = 0; i < rows; ++i)
      if (whole || i * row_step < entries)
        copy16_async(to + i * row_step * 128, source[i] + ahead * tile_k, bytes);
    copy_arrive(&shared.full[place.stage]);
    place.advance();
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) source[i] += step_group * tile_k;
}

__device__ void gather(Shared& shared, const TensorMap& x, const bf16* w, uint32 k, int steps,
                       int tiles_n, const uint32* entry, const uint2* unit, uint32* control) {
  RingPlace<stages> place;
  const auto look_up = [&](int index) { return unit[index]; };
  UnitWalk walk(shared.queue, control + next_up, control[num_units], look_up);
  for (Unit own_unit; (own_unit = walk.next(look_up)).index >= 0;) {
    const int block = own_unit.a >> 16, start = (own_unit.a & 0xffffu) * unit_entries;
    const int entries = own_unit.b;
    const uint32* own = entry + static_cast<uint64>(block) * tiles_n * tile_neurons + start;
    const bf16* source[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = threadIdx.x / 8 + i * row_step;
      // What lies in rows without an entry ends up in columns that nobody reads.
      const uint32 neuron = row < entries ? entry_neuron(own[row]) : 0;
      source[i] = w + static_cast<uint64>(neuron) * k + threadIdx.x % 8 * 8;
    }
    if (entries >= unit_entries && k % (step_group * tile_k) == 0) {
      for (int step = 0; step < steps; step += step_group)
        gather_steps<true>(shared, place, x, block, source, entries, step, steps, k);
    } else {
      for (int step = 0; step < steps; step += step_group)
        gather_steps<false>(shared, place, x, block, source, entries, step, steps, k);
    }
  }
}

// gate * (up + add), pairwise.
__device__ __forceinline__ uint32 product(uint32 gate, uint32 up, float add) {
  return pack_bf16(bf16_low(gate) * (bf16_low(up) + add), bf16_high(gate) * (bf16_high(up) + add));
}

__device__ void multiply(Shared& shared, int steps, int tiles_n, const bf16* bias,
                         const uint32* entry, const uint2* unit, uint32* control, bf16* value) {
  const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float d[64];
  RingPlace<stages> place;
  const auto look_up = [](int) { return make_uint2(0, 0); };
  UnitWalk walk(shared.queue, nullptr, 0, look_up);
  for (Unit own_unit; (own_unit = walk.next(look_up)).index >= 0;) {
    const int block = own_unit.a >> 16, start = (own_unit.a & 0xffffu) * unit_entries;
    const int entries = own_unit.b;
    const uint64 base = static_cast<uint64>(block) * tiles_n * tile_neurons;
    // Lane l finishes entries 8j + l/4 of its warpgroup; named now, needed after the products.
    uint32 member[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int own = consumer * 128 + 8 * j + lane / 4;
      member[j] = own < entries ? entry[base + start + own] : none;
    }
    uint2 gate[16];
    bf16* columns = value + base * block_tokens + 16 * warp + 4 * (lane % 4);
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&shared.full[place.stage], place.parity);
      fence_async_proxy();
      wgmma_begin();
      const uint32 a = smem_address(shared.x[place.stage]);
      const uint32 b = smem_address(shared.w[place.stage] + consumer * 128 * tile_k);
#pragma unroll
      for (int k = 0; k < tile_k / 16; ++k)
        wgmma_n128<0, 0>(d, operand(a + 32 * k, 0, 1024), operand(b + 32 * k, 0, 1024),
                         step > 0 || k > 0);
      wgmma_commit();
      if (step == steps / 2) {  // the members are here by now, and the gate will be in time
#pragma unroll
        for (int j = 0; j < 16; ++j)
          if (member[j] != none)
            gate[j] =
                *reinterpret_cast<const uint2*>(columns + entry_slot(member[j]) * block_tokens);
      }
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[place.previous()]);
      place.advance();
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[place.previous()]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint32 upper = transpose_8x8(pack_bf16(d[4 * j], d[4 * j + 1]));
      const uint32 lower = transpose_8x8(pack_bf16(d[4 * j + 2], d[4 * j + 3]));
      if (member[j] == none) continue;
      const float add = bias == nullptr ? 0.0f : bf16_low(bias[entry_neuron(member[j])]);
      *reinterpret_cast<uint2*>(columns + entry_slot(member[j]) * block_tokens) =
          make_uint2(product(gate[j].x, upper, add), product(gate[j].y, lower, add));
    }
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    union_up(const __grid_constant__ TensorMap x_MK, const bf16* w_NK, const bf16* bias_N, int k,
             int tiles_n, const uint32* entry, const uint2* unit, uint32* control, bf16* value) {
  extern __shared__ unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(raw) + 1023) & ~1023ull);
  const int steps = (k + tile_k - 1) / tile_k;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(&shared.full[stage], gather_threads + 1);
      barrier_init(&shared.empty[stage], 2);
    }
    shared.queue.init();
    barrier_init_fence();
  }
  __syncthreads();
  admit_next_kernel();
  await_previous_kernel();
  if (threadIdx.x < gather_threads) {
    registers_decrease<120>();
    gather(shared, x_MK, w_NK, k, steps, tiles_n, entry, unit, control);
  } else {
    registers_increase<192>();
    multiply(shared, steps, tiles_n, bias_N, entry, unit, control, value);
  }
}

extern "C" __device__ const uint32 union_up_shared_bytes = sizeof(Shared) + 1024;
