// decode_down: y = h · W_downᵀ + b for up to 64 tokens, h as decode_gate leaves it (decode.cuh),
// the weights transposed: a neuron's are a row.
//
// A block computes 16 columns of y. It concatenates the sections' neurons in shared memory, as many at a
// time as fit; each warp processes every eighth group of 16, with tokens as the 16-row operand of
// mma.sync. The sums of the warps are added in shared memory, in a fixed order.
#include "common/decode.cuh"

namespace {
using namespace decode_down_tiles;
constexpr int w_row = block_columns * 2;  // bytes
static_assert(group == 16, "the k of an mma");
static_assert(w_row == 32, "of a row two lanes copy 16 bytes each");
static_assert(speculative % 8 == 0, "eight neurons are 16 bytes");
static_assert(block_threads == max_decode_tokens * (block_columns / 4), "a thread stores four columns");
static_assert((max_sections & (max_sections - 1)) == 0, "list_many halves them");

template <int octets>
constexpr int ring_slots = octets <= 2 ? 8 : 4;

template <int octets>
struct Slot {
  unsigned char w[group * w_row];
  unsigned char h[group * octets * 16];
};

template <int octets>
constexpr int ring_bytes = num_warps * ring_slots<octets> * sizeof(Slot<octets>);
static_assert(ring_bytes<8> >= ring_bytes<4> && ring_bytes<8> >= ring_bytes<2>);

struct Shared {
  union {  // the warps' rings, in the end their sums
    alignas(128) unsigned char ring[ring_bytes<8>];
    float sums[num_warps][max_decode_tokens][block_columns];
  };
  uint32 list[window];          // row of `value` << 16 | neuron
  uint32 before[max_sections];  // neurons in earlier sections
  uint32 warp_total[num_warps];
};

struct Input {
  const uint16* neuron;
  const element* value;
  const element* w;
  int sections, stride, n, k;
};

__device__ __forceinline__ uint32 entry_of(const Input& in, uint32 section, uint32 place,
                                           uint32 neuron) {
  return (first_neuron(section, in.sections, in.n) + place) << 16 | neuron;
}

// All active neurons, where no section has more of them than `pairs`.
__device__ __forceinline__ void list_few(Shared& shared, const Input& in,
                                         const uint4 (&pairs)[speculative / 8], uint32 count) {
  uint32* to = shared.list + shared.before[threadIdx.x];
#pragma unroll
  for (uint32 i = 0; i < speculative; ++i) {
    const uint4& eight = pairs[i / 8];
    const uint32 words[4] = {eight.x, eight.y, eight.z, eight.w}, pair = words[i % 8 / 2];
    if (i < count) to[i] = entry_of(in, threadIdx.x, i, i % 2 == 0 ? pair & 0xffffu : pair >> 16);
  }
}

// Lists `num` of the active neurons, from the `start`-th on.
__device__ __forceinline__ void list_many(Shared& shared, const Input& in, uint32 start, int num) {
#pragma unroll 2
  for (int i = threadIdx.x; i < num; i += block_threads) {
    uint32 section = 0;  // the last with before[section] <= start + i
#pragma unroll
    for (int step = max_sections / 2; step > 0; step /= 2)
      if (shared.before[section + step] <= start + i) section += step;
    const uint32 place = start + i - shared.before[section];
    shared.list[i] = entry_of(in, section, place, in.neuron[section * in.stride + place]);
  }
}

// Fills `before` and returns how many neurons are active; `many`: some section has over `speculative`.
__device__ __forceinline__ uint32 scan(Shared& shared, uint32 count, bool& many) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 up_to = sum_to_lane(count);
  if (lane == 31) shared.warp_total[warp] = up_to;
  many = __syncthreads_or(count > speculative) != 0;
  uint32 earlier = 0, total = 0;
#pragma unroll
  for (int i = 0; i < num_warps; ++i) {
    if (i == warp) earlier = total;
    total += shared.warp_total[i];
  }
  shared.before[threadIdx.x] = earlier + up_to - count;
  return total;
}

// A warp's copies of one group of 16 of the `num` neurons in the list.
template <int octets>
__device__ __forceinline__ void copy_group(Slot<octets>& to, const Shared& shared, const Input& in,
                                           int first, int num) {
  const int lane = threadIdx.x % 32;
  // Absent neurons are zeros in both operands: zero times stale memory could be NaN.
  const auto entry = [&](int row) { return first + row < num ? shared.list[first + row] : 0; };
  const auto bytes = [&](int row) { return first + row < num ? 16 : 0; };
  const int row_w = lane / 2, column = blockIdx.x * block_columns + lane % 2 * 8;
  copy16_async(smem_address(to.w) + swizzled<32>(row_w, lane % 2),
               in.w + static_cast<uint64>(entry(row_w) & 0xffffu) * in.k + column,
               column < in.k ? bytes(row_w) : 0);
#pragma unroll
  for (int piece = 0; piece < group * octets; piece += 32) {
    const int row = (piece + lane) / octets, chunk = (piece + lane) % octets;
    if (row < group)
      copy16_async(smem_address(to.h) + swizzled<16 * octets>(row, chunk),
                   in.value + static_cast<uint64>(entry(row) >> 16) * (8 * octets) + chunk * 8,
                   bytes(row));
  }
}

// Sums of a warp: [16 tokens][8 columns][element of the fragment].
template <int octets>
using Sums = float[(octets + 1) / 2][2][4];

template <int octets>
__device__ __forceinline__ void multiply(const Slot<octets>& from, Sums<octets>& d) {
  const int lane = threadIdx.x % 32;
  uint32 w[4];
  load_matrices_transposed(w, smem_address(from.w) + swizzled<32>(lane % 16, lane / 16));
#pragma unroll
  for (int tile = 0; tile < (octets + 1) / 2; ++tile) {
    uint32 h[4];
    if (octets == 1) {  // two matrices are all there are: neurons 0 to 7 and 8 to 15
      load_matrices_transposed(h, smem_address(from.h) + swizzled<16 * octets>(lane % 16, 0));
      h[2] = h[1];
      h[1] = h[3] = 0;
    } else {
      const int row = lane / 16 * 8 + lane % 8, chunk = 2 * tile + lane / 8 % 2;
      load_matrices_transposed(h, smem_address(from.h) + swizzled<16 * octets>(row, chunk));
    }
    mma(d[tile][0], h, w[0], w[1]);
    mma(d[tile][1], h, w[2], w[3]);
  }
}

// Adds this warp's share of the list's `num` neurons.
template <int octets>
__device__ __forceinline__ void multiply_list(Shared& shared, const Input& in, int num,
                                              Sums<octets>& d) {
  constexpr int depth = ring_slots<octets>, step = num_warps * group;
  Slot<octets>* ring = reinterpret_cast<Slot<octets>*>(shared.ring) + threadIdx.x / 32 * depth;
  int next = threadIdx.x / 32 * group;
#pragma unroll 1
  for (int slot = 0; slot < depth; ++slot, next += step) {
    if (next < num) copy_group<octets>(ring[slot], shared, in, next, num);
    copy_commit();
  }
  int slot = 0;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * group; first < num; first += step, next += step) {
    copy_wait<depth - 1>();
    __syncwarp();  // the other lanes' copies
    multiply<octets>(ring[slot], d);
    __syncwarp();  // all have read what is overwritten
    if (next < num) copy_group<octets>(ring[slot], shared, in, next, num);
    copy_commit();
    slot = slot + 1 == depth ? 0 : slot + 1;
  }
}

// Adds up the warps' sums, four columns of a token per thread.
template <int octets>
__device__ __forceinline__ void store(Shared& shared, const Sums<octets>& d, const element* bias,
                                      element* y, int m, int k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = threadIdx.x / 4, place = threadIdx.x % 4 * 4;
  const int column = blockIdx.x * block_columns + place;
  const bool own = token < m && column < k;
  uint2 add = make_uint2(0, 0);
  if (own && bias != nullptr) add = *reinterpret_cast<const uint2*>(bias + column);
  __syncthreads();  // the rings are read
#pragma unroll
  for (int octet = 0; octet < octets; ++octet)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = d[octet / 2][half] + octet % 2 * 2;
      *reinterpret_cast<float2*>(
          &shared.sums[warp][octet * 8 + lane / 4][half * 8 + lane % 4 * 2]) =
          make_float2(from[0], from[1]);
    }
  __syncthreads();
  if (!own) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int share = 0; share < num_warps; ++share)
    add_share(sum, *reinterpret_cast<const float4*>(&shared.sums[share][token][place]));
  *reinterpret_cast<uint2*>(y + static_cast<uint64>(token) * k + column) =
      make_uint2(pack_elements(sum.x + element_low(add.x), sum.y + element_high(add.x)),
                 pack_elements(sum.z + element_low(add.y), sum.w + element_high(add.y)));
}

// All that a block does once it knows how many neurons are active.
struct Columns {
  Shared& shared;
  const Input& in;
  const uint4 (&pairs)[speculative / 8];
  uint32 own, total;
  bool many;
  const element* bias;
  element* y;
  int m;

  template <int octets>
  __device__ __forceinline__ void run() const {
    Sums<octets> d = {};
#pragma unroll 1
    for (uint32 start = 0; start < total; start += window) {
      const int here = min(total - start, static_cast<uint32>(window));
      if (many || total > window) {
        __syncthreads();  // `before` is there, and nobody reads the list of the window before
        list_many(shared, in, start, here);
      } else {
        list_few(shared, in, pairs, own);
      }
      __syncthreads();
      multiply_list<octets>(shared, in, here, d);
    }
    store<octets>(shared, d, bias, y, m, in.k);
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 2)
    decode_down(const element* w_NK, const element* bias_K, int m, int n, int k, int sections,
                int stride, const uint32* count, const uint16* neuron, const element* value,
                element* y_MK, uint32* observed) {
  Shared& shared = dynamic_shared<Shared>();
  admit_next_kernel();
  await_previous_kernel();
  const Input in{neuron, value, w_NK, sections, stride, n, k};
  uint32 own = 0;
  uint4 pairs[speculative / 8] = {};
  if (threadIdx.x < sections) {
    own = count[threadIdx.x];
#pragma unroll
    for (int i = 0; i < speculative / 8; ++i)
      pairs[i] = reinterpret_cast<const uint4*>(neuron + threadIdx.x * stride)[i];
  }
  bool many;
  const uint32 total = scan(shared, own, many);
  if (observed != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *observed = total;
  with_octets(m, Columns{shared, in, pairs, own, total, many, bias_K, y_MK, m});
}

extern "C" __device__ const uint32 exported_columns = block_columns,
                                   exported_shared_bytes = sizeof(Shared);
