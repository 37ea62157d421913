// hybrid_weight_grad, hybrid_carry: ∇W_up = Σ ∇up · x, ∇W_gate = Σ ∇gate · x and ∇W_down = Σ h · ∇y over
// the rows for which a neuron is active, neuron by neuron, from the transposed hybrid format
// (common/hybrid.cuh).
//
// All non-zeros, sorted by neuron, are divided into segments of equal size, so that the work is balanced
// however uneven the neurons are. A warp computes one segment and 256 columns. Partial sums of a neuron
// that spans several segments are stored in `carry`; hybrid_carry adds them in a fixed order. Neurons
// that are active for no row get zeros.
//
//   carry  [segments][2][3][K]  fp32  of a segment's first neuron, if it began before; of its last, if
//                                     it goes on: ∇W_up, ∇W_gate, ∇W_down
#include "common/hybrid.cuh"

namespace {
constexpr int threads = 128, group = 8;
static_assert(32 % group == 0, "of the non-zeros that a warp's lanes hold");

struct Values {
  const uint32 *word, *pair;  // ∇up in the low half, ∇gate in the high one
  const element* up;             // null without a gate: the word has h
  uint32 width;
  const int* token;
};

struct Output {
  void *up, *gate, *down;  // gate: null without one
  bool is_float, adds;     // fp32, or bf16; whether to add to the matrices, which are then fp32
};

using Sums = float[3][8];

// Adds the contributions of the non-zeros [from, to) to this lane's eight columns.
__device__ __forceinline__ void add_entries(Sums& sum, const uint32* source, uint32 from, uint32 to,
                                            const Values& v, const element* x, const element* dy,
                                            int k, int column) {
  const uint32 lane = threadIdx.x % 32;
  for (uint32 start = from; start < to; start += 32) {
    uint32 own_row = 0, own_token = 0, own_pair = 0;
    float own_h = 0.0f;
    if (start + lane < to) {
      const uint32 place = source[start + lane];
      own_row = place / v.width;
      own_token = v.token == nullptr ? own_row : v.token[own_row];
      own_pair = v.pair[place];
      own_h = word_value(v.word[place]);
      if (v.up != nullptr)
        own_h = element_low(pack_elements(own_h * element_low(v.up[place]), 0.0f));
    }
    const int entries = min(32u, to - start);
    for (int at = 0; at < entries; at += group) {
      uint4 of_x[group], of_dy[group];
#pragma unroll
      for (int i = 0; i < group; ++i) {
        const uint64 row = __shfl_sync(~0u, own_row, at + i);
        const uint64 token = __shfl_sync(~0u, own_token, at + i);
        of_x[i] = of_dy[i] = make_uint4(0, 0, 0, 0);
        if (at + i < entries && column < k) {
          of_x[i] = load_early(x + row * k + column);
          of_dy[i] = load_early(dy + token * k + column);
        }
      }
#pragma unroll
      for (int i = 0; i < group; ++i) {
        const uint32 pair = __shfl_sync(~0u, own_pair, at + i);
        const float h = __shfl_sync(~0u, own_h, at + i);
        add_multiple(sum[0], element_low(pair), of_x[i]);
        add_multiple(sum[1], element_high(pair), of_x[i]);
        add_multiple(sum[2], h, of_dy[i]);
      }
    }
  }
}

__device__ __forceinline__ void write_row(void* matrix, const Output& out, uint64 at,
                                          const float (&sum)[8]) {
  if (matrix == nullptr) return;
  if (!out.is_float) {
    *reinterpret_cast<uint4*>(static_cast<element*>(matrix) + at) =
        make_uint4(pack_elements(sum[0], sum[1]), pack_elements(sum[2], sum[3]),
                   pack_elements(sum[4], sum[5]), pack_elements(sum[6], sum[7]));
    return;
  }
  float4* to = reinterpret_cast<float4*>(static_cast<float*>(matrix) + at);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 own = make_float4(sum[4 * half], sum[4 * half + 1], sum[4 * half + 2], sum[4 * half + 3]);
    if (out.adds) {
      const float4 before = to[half];
      own = make_float4(before.x + own.x, before.y + own.y, before.z + own.z, before.w + own.w);
    }
    to[half] = own;
  }
}

__device__ __forceinline__ void write(const Output& out, uint32 neuron, int k, int column,
                                      const Sums& sum) {
  if (column >= k) return;
  const uint64 at = static_cast<uint64>(neuron) * k + column;
  write_row(out.up, out, at, sum[0]);
  write_row(out.gate, out, at, sum[1]);
  write_row(out.down, out, at, sum[2]);
}

// A segment's sums for its first neuron, or its last.
__device__ __forceinline__ uint64 carried(int segment, int last, int matrix, int k, int column) {
  return ((static_cast<uint64>(segment) * 2 + last) * 3 + matrix) * k + column;
}

__device__ __forceinline__ void write_carry(float* carry, int segment, int last, int k, int column,
                                            const Sums& sum) {
  if (column >= k) return;
#pragma unroll
  for (int matrix = 0; matrix < 3; ++matrix) {
    const float (&own)[8] = sum[matrix];
    float4* to = reinterpret_cast<float4*>(carry + carried(segment, last, matrix, k, column));
    to[0] = make_float4(own[0], own[1], own[2], own[3]);
    to[1] = make_float4(own[4], own[5], own[6], own[7]);
  }
}

__device__ __forceinline__ void add_carry(Sums& sum, const float* carry, int segment, int last, int k,
                                          int column) {
  if (column >= k) return;
#pragma unroll
  for (int matrix = 0; matrix < 3; ++matrix) {
    const float4* from =
        reinterpret_cast<const float4*>(carry + carried(segment, last, matrix, k, column));
    const float4 low = from[0], high = from[1];
    float (&own)[8] = sum[matrix];
    own[0] += low.x, own[1] += low.y, own[2] += low.z, own[3] += low.w;
    own[4] += high.x, own[5] += high.y, own[6] += high.z, own[7] += high.w;
  }
}

// The first neuron whose non-zeros begin at `at` or later; n if there is none.
__device__ __forceinline__ uint32 neuron_from(const uint32* first, int n, uint32 at) {
  uint32 low = 0, high = n;
  while (low < high) {
    const uint32 middle = (low + high) / 2;
    if (first[middle] < at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// A warp's part of the work: a segment of the non-zeros, [from, end), and this lane's first column.
struct Part {
  int segment, column;
  uint32 share, from, end;  // share: of a segment
  bool last;                // it also covers the neurons after its non-zeros

  __device__ __forceinline__ Part(const uint32* first, int n, int k, int segments) {
    // Segments vary fastest: warps that run at a time are at the same columns of x and ∇y, which L2 holds.
    const int unit = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    segment = unit % segments;
    column = unit / segments * chunk_columns + threadIdx.x % 32 * 8;
    const uint32 total = first[n];
    share = (total + segments - 1) / segments;
    from = min(total, segment * share);
    end = min(total, from + share);
    // The segment with the last non-zero also covers the neurons after it; if there is none, the first.
    last = end == total && (from < total || segment == 0);
  }
  // Whether there is anything to do; warps beyond the last columns have nothing.
  __device__ __forceinline__ bool any(int k) const {
    return column / chunk_columns * chunk_columns < k && (from < end || last);
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(threads, 4)
    hybrid_weight_grad(const element* x_MK, const element* dy_MK, int k, int n, const uint32* word,
                       const uint32* pair, const element* up, int width, const int* token,
                       const uint32* first, const uint32* source, int segments, float* carry,
                       int is_float, int adds, void* up_NK, void* gate_NK, void* down_NK) {
  await_previous_kernel();
  const Part part(first, n, k, segments);
  if (!part.any(k)) return;
  const Values values{word, pair, up, static_cast<uint32>(width), token};
  const Output out{up_NK, gate_NK, down_NK, is_float != 0, adds != 0};
  const int segment = part.segment, column = part.column;
  const uint32 from = part.from, end = part.end;
  uint32 neuron = neuron_from(first, n, from);
  if (neuron > 0 && first[neuron] > from) {  // the neuron of the segment before continues here
    Sums sum = {};
    add_entries(sum, source, from, min(end, first[neuron]), values, x_MK, dy_MK, k, column);
    write_carry(carry, segment, 0, k, column, sum);
  }
  for (; neuron < n && (first[neuron] < end || part.last); ++neuron) {
    const uint32 own_end = first[neuron + 1];
    if (out.adds && own_end == first[neuron]) continue;
    Sums sum = {};
    add_entries(sum, source, first[neuron], min(end, own_end), values, x_MK, dy_MK, k, column);
    if (own_end <= end)
      write(out, neuron, k, column, sum);
    else
      write_carry(carry, segment, 1, k, column, sum);
  }
}

// The neuron that begins in a segment and ends in another one.
extern "C" __global__ void __launch_bounds__(threads, 4)
    hybrid_carry(int k, int n, const uint32* first, int segments, const float* carry, int is_float,
                 int adds, void* up_NK, void* gate_NK, void* down_NK) {
  await_previous_kernel();
  const Part part(first, n, k, segments);
  if (!part.any(k)) return;
  const uint32 behind = neuron_from(first, n, part.end);
  if (behind == 0 || first[behind] <= part.end || first[behind - 1] < part.from) return;
  Sums sum = {};
  add_carry(sum, carry, part.segment, 1, k, part.column);
  for (int next = part.segment + 1; static_cast<uint64>(next) * part.share < first[behind]; ++next)
    add_carry(sum, carry, next, 0, k, part.column);
  const Output out{up_NK, gate_NK, down_NK, is_float != 0, adds != 0};
  write(out, behind - 1, k, part.column, sum);
}

extern "C" __device__ const uint32 exported_chunk_columns = chunk_columns;
