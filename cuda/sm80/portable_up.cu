// portable_up: h = gate * (x · W_upᵀ) on the union format, in place of the gate. What union_up
// does, for GPUs other than Hopper.
//
// A work unit is 64 tokens × 256 entries of their block's union; x and the rows of W_up that the
// entries name come with cp.async, 32 k at a time.
#include "sm80/portable.cuh"

namespace {
constexpr int row_bytes = stage_inner * 2;
static_assert(unit_width == unit_members);

struct alignas(128) Shared {
  unsigned char x[stages][block_tokens * row_bytes];
  unsigned char w[stages][unit_width * row_bytes];
  WorkUnit unit[2];
};

// Where 16 bytes, chunk `chunk` of 64-byte row `row`, lie: of 8 rows each in its own banks.
__device__ __forceinline__ uint32 swizzled(int row, int chunk) {
  return row * row_bytes + ((chunk ^ row / 2 % 4) << 4);
}

// What a thread copies of every stage: 16 bytes of one token's row and of four entries' rows.
constexpr int row_step = block_threads / 4, rows = unit_width / row_step;

struct Source {
  const bf16* x;
  const bf16* w[rows];
  int k_left;  // from this thread's chunk on, never negative for a whole stage
  int entries;
  bool token;  // is there one
};

__device__ __forceinline__ Source source_of(const bf16* x, const bf16* w, const uint32* list, int m,
                                            int k, int block, int entries) {
  const int row = threadIdx.x / 4, chunk = threadIdx.x % 4 * 8;
  const int token = block * block_tokens + row;
  Source from{x + static_cast<uint64>(token) * k + chunk, {}, k - chunk, entries, token < m};
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int at = row + i * row_step;
    const uint32 neuron = at < entries ? entry_neuron(list[at]) : 0;
    from.w[i] = w + static_cast<uint64>(neuron) * k + chunk;
  }
  return from;
}

__device__ __forceinline__ void copy_stage(Shared& shared, int stage, Source& from) {
  const int row = threadIdx.x / 4;
  const uint32 to = swizzled(row, threadIdx.x % 4), bytes = from.k_left > 0 ? 16 : 0;
  copy16_async(smem_address(shared.x[stage]) + to, from.x, from.token ? bytes : 0);
  from.x += stage_inner;
  const uint32 to_w = smem_address(shared.w[stage]) + to;
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    // What lies in rows without an entry ends up in columns that nobody reads.
    if (row + i * row_step < from.entries)
      copy16_async(to_w + i * row_step * row_bytes, from.w[i], bytes);
    from.w[i] += stage_inner;
  }
  from.k_left -= stage_inner;
}

// A warp's columns are 16 of every 64 entries, so that a small unit is shared by all warps;
// `groups` counts those 16s that have entries.
constexpr int group_step = 64, max_groups = unit_width / group_step;

template <bool whole>
__device__ __forceinline__ void multiply_stage(const Shared& shared, int stage, int groups,
                                               Sums& d) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 of_x = swizzled(warp / 4 * 32 + lane % 16, lane / 16);
  const uint32 of_w = swizzled(warp % 4 * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < stage_inner / mma_inner; ++k) {
    const uint32 from_x = smem_address(shared.x[stage]) + (of_x ^ 32 * k);
    const uint32 from_w = smem_address(shared.w[stage]) + (of_w ^ 32 * k);
    uint32 x[2][4];
    load_matrices(x[0], from_x);
    load_matrices(x[1], from_x + 16 * row_bytes);
#pragma unroll
    for (int group = 0; group < max_groups; ++group) {
      if (!whole && group >= groups) break;
      uint32 w[4];
      load_matrices(w, from_w + group * group_step * row_bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(d[half][2 * group], x[half], w[0], w[1]);
        mma(d[half][2 * group + 1], x[half], w[2], w[3]);
      }
    }
  }
}

// gate * (up + add), pairwise; with `relu` of the sum.
__device__ __forceinline__ uint32 product(uint32 gate, uint32 up, float add, bool relu) {
  const float low = bf16_low(up) + add, high = bf16_high(up) + add;
  return pack_bf16(bf16_low(gate) * (relu && low < 0.0f ? 0.0f : low),
                   bf16_high(gate) * (relu && high < 0.0f ? 0.0f : high));
}

// The gate's columns, times the sums; `list` and `value` are those of the unit and of the block.
__device__ __forceinline__ void finish(const Sums& d, const uint32* list, int entries,
                                       const bf16* bias, bf16* value, bool relu) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bf16* columns = value + warp / 4 * 32 + 4 * (lane % 4);
  uint32 member[8];  // lane l finishes entries l / 4 of 8, once they are transposed
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int own = j / 2 * group_step + warp % 4 * 16 + j % 2 * 8 + lane / 4;
    member[j] = own < entries ? list[own] : no_entry;
  }
  const auto column = [&](int j) {
    return reinterpret_cast<uint2*>(columns + entry_slot(member[j]) * block_tokens);
  };
  // As many loads at a time as there are registers for; none of them may pass a store.
  constexpr int batch = 4;
#pragma unroll
  for (int first = 0; first < 8; first += batch) {
    uint2 gate[batch][2] = {};
    float add[batch] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int j = first + i;
      if (member[j] == no_entry) continue;
      if (bias != nullptr) add[i] = bf16_low(bias[entry_neuron(member[j])]);
#pragma unroll
      for (int half = 0; half < 2; ++half) gate[i][half] = column(j)[4 * half];
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int j = first + i;
      uint2 h[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 upper = transpose_8x8(pack_bf16(d[half][j][0], d[half][j][1]));
        const uint32 lower = transpose_8x8(pack_bf16(d[half][j][2], d[half][j][3]));
        h[half] = make_uint2(product(gate[i][half].x, upper, add[i], relu),
                             product(gate[i][half].y, lower, add[i], relu));
      }
      if (member[j] == no_entry) continue;
      column(j)[0] = h[0];
      column(j)[4] = h[1];
    }
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    portable_up(const bf16* x_MK, const bf16* w_NK, const bf16* bias_N, int m, int k, int tiles_n,
                const uint32* entry, const uint2* unit, uint32* control, bf16* value,
                int relu_up) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  await_previous_kernel();
  const int steps = (k + stage_inner - 1) / stage_inner;
  const auto look_up = [&](int index) { return unit[index]; };
  UnitWalk walk(shared.unit, control + next_up, control[num_units]);
  for (WorkUnit own; (own = walk.next(look_up)).index >= 0;) {
    const int block = own.a >> 16, start = (own.a & 0xffffu) * unit_members;
    const int entries = min(static_cast<int>(own.b), unit_members);
    const uint64 base = static_cast<uint64>(block) * tiles_n * tile_neurons;
    const uint32* list = entry + base + start;
    const int groups = (entries - threadIdx.x / 32 % 4 * 16 + group_step - 1) / group_step;
    Source from = source_of(x_MK, w_NK, list, m, k, block, entries);
    Sums d = {};
    run_ring(
        steps, [&](int stage) { copy_stage(shared, stage, from); },
        [&](int stage) {
          if (groups >= max_groups)
            multiply_stage<true>(shared, stage, groups, d);
          else
            multiply_stage<false>(shared, stage, groups, d);
        },
        [&](int left) { walk.approach_end(left, look_up); });
    finish(d, list, entries, bias_N, value + base * block_tokens, relu_up != 0);
  }
}

extern "C" __device__ const uint32 portable_up_shared_bytes = sizeof(Shared);
