// portable_down: y = h · W_downᵀ, h in the union format. What union_down does, with
// mma.sync, for GPUs other than Hopper.
//
// A work unit is one block of 64 tokens × 256 output columns. It runs over the block's union, 32
// entries a stage: their h columns and the 512-byte pieces of their weight rows come with cp.async.
// Both are stored with the entry as the slow index; ldmatrix transposes them.
#include "sm80/portable.cuh"

namespace {
constexpr int h_bytes = block_tokens * 2, w_bytes = unit_width * 2;  // a row: one entry

struct alignas(128) Shared {
  unsigned char h[stages][stage_inner * h_bytes];
  unsigned char w[stages][stage_inner * w_bytes];
  WorkUnit unit[2];
};

// Where 16 bytes, chunk `chunk` of a row, lie: of 8 rows each in its own banks.
template <int row_bytes>
__device__ __forceinline__ uint32 swizzled(int row, int chunk) {
  return row * row_bytes + ((chunk ^ row % 8) << 4);
}

// What a thread copies, stage by stage: 16 bytes of one entry's h and of four entries' weights.
struct Source {
  const uint32* list;  // this lane's entry of the stage `stages - 1` after the next
  const bf16* h;
  const bf16* w;
  uint32 columns;  // of a row of weights
  int present;  // entries from the next stage on
  bool inside;  // this thread's columns exist
  uint32 ahead[stages - 1];  // this lane's entries of the next stages
};

__device__ __forceinline__ Source source_of(const uint32* list, const bf16* h, const bf16* w,
                                            uint32 columns, uint32 first_column, int total) {
  const int lane = threadIdx.x % 32;
  const uint32 column = first_column + lane * 8;
  Source from{list + lane, h + threadIdx.x % 8 * 8, w + column, columns, total, column < columns};
#pragma unroll
  for (int i = 0; i < stages - 1; ++i, from.list += stage_inner)
    from.ahead[i] = lane + i * stage_inner < total ? *from.list : 0;
  return from;
}

__device__ __forceinline__ void copy_stage(Shared& shared, int stage, Source& from) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 own = from.ahead[0];
#pragma unroll
  for (int i = 0; i < stages - 2; ++i) from.ahead[i] = from.ahead[i + 1];
  from.ahead[stages - 2] = lane + (stages - 1) * stage_inner < from.present ? *from.list : 0;
  from.list += stage_inner;

  // Entries that are not there count as zeros on both sides: zero times a left-over could be NaN.
  const uint32 to_w = smem_address(shared.w[stage]) + swizzled<w_bytes>(warp, lane);
#pragma unroll
  for (int i = 0; i < stage_inner / 8; ++i) {
    const int row = 8 * i + warp;
    const uint32 neuron = entry_neuron(__shfl_sync(~0u, own, row));
    copy16_async(to_w + 8 * i * w_bytes, from.w + static_cast<uint64>(neuron) * from.columns,
                 from.inside && row < from.present ? 16 : 0);
  }
  const int row = threadIdx.x / 8;
  const uint32 slot = entry_slot(__shfl_sync(~0u, own, row));
  copy16_async(smem_address(shared.h[stage]) + swizzled<h_bytes>(row, threadIdx.x % 8),
               from.h + slot * block_tokens, row < from.present ? 16 : 0);
  from.present -= stage_inner;
}

__device__ __forceinline__ void multiply_stage(const Shared& shared, int stage, Sums& d) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 of_h =
      swizzled<h_bytes>(lane / 16 * 8 + lane % 8, warp / 4 * 4 + lane / 8 % 2);
  const uint32 of_w = swizzled<w_bytes>(lane % 16, warp % 4 * 8 + lane / 16);
#pragma unroll
  for (int k = 0; k < stage_inner; k += mma_inner) {
    const uint32 from_h = smem_address(shared.h[stage]) + k * h_bytes;
    const uint32 from_w = smem_address(shared.w[stage]) + k * w_bytes;
    uint32 h[2][4];
    load_matrices_transposed(h[0], from_h + of_h);
    load_matrices_transposed(h[1], from_h + (of_h ^ 32));
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // of 16 columns
      uint32 w[4];
      load_matrices_transposed(w, from_w + (of_w ^ 32 * group));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(d[half][2 * group], h[half], w[0], w[1]);
        mma(d[half][2 * group + 1], h[half], w[2], w[3]);
      }
    }
  }
}

// A warp's sums, whose first token and column are `row` and `column`, plus the bias (or null).
// `token_M`: the row of y that each token is, or null where it is its number.
__device__ __forceinline__ void store(const Sums& d, const bf16* bias, const int* token_M, bf16* y,
                                      int m, int k, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int first = column + 32 * part;
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {  // rows of the same 16: lane / 4, and 8 below
      const int own = row + eight / 2 * 16 + token_at(lane / 4 + eight % 2 * 8);
      const int token = token_M == nullptr || own >= m ? own : token_M[own];
      uint32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* sum = d[eight / 2][4 * part + j] + eight % 2 * 2;
        word[j] = pack_biased(sum[0], sum[1], bias, first + 8 * j + 2 * (lane % 4), k);
      }
      transpose_quad(word);  // 8 columns a lane: 16-byte stores
      const int octet = first + 8 * (lane % 4);
      if (token < m && octet < k)
        *reinterpret_cast<uint4*>(y + static_cast<uint64>(token) * k + octet) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    portable_down(const bf16* w_NK, const bf16* bias_K, int m, int k, int tiles_n,
                  const uint32* entry, const uint2* order, uint32* control, const bf16* value,
                  const int* token_M, bf16* y_MK) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  await_previous_kernel();
  const int warp = threadIdx.x / 32, units_k = (k + unit_width - 1) / unit_width;
  const int blocks = (m + block_tokens - 1) / block_tokens;
  const auto look_up = [&](int index) { return order[index / units_k]; };
  UnitWalk walk(shared.unit, control + next_down, blocks * units_k);
  for (WorkUnit own; (own = walk.next(look_up)).index >= 0;) {
    const int block = own.a, total = own.b, first_column = own.index % units_k * unit_width;
    const uint64 base = static_cast<uint64>(block) * tiles_n * tile_neurons;
    Source from = source_of(entry + base, value + base * block_tokens, w_NK, k,
                            first_column, total);
    Sums d = {};
    run_ring(
        (total + stage_inner - 1) / stage_inner,
        [&](int stage) { copy_stage(shared, stage, from); },
        [&](int stage) { multiply_stage(shared, stage, d); },
        [&](int left) { walk.approach_end(left, look_up); });
    store(d, bias_K, token_M, y_MK, m, k, block * block_tokens + warp / 4 * 32,
          first_column + warp % 4 * 64);
  }
}

extern "C" __device__ const uint32 portable_down_shared_bytes = sizeof(Shared);
