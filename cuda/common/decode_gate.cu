// decode_gate: h = relu(x · W_gateᵀ + b) * (x · W_upᵀ + b) for up to 64 tokens, kept where it is not zero
// (decode.cuh); without W_up, h = relu(x · Wᵀ + b).
//
// Bound by memory: all of the gate's weights are read, and of W_up the rows of active neurons. A block
// owns a section of neurons, N / blocks to within one, so that all multiprocessors finish together. It
// knows by itself which of its neurons are active, so both products are one kernel (few_tokens.cuh).
//
// The gate's weights may be in e4m3 (SPARSELLM_E4M3); those of up are elements.
#include "common/activation.cuh"
#include "common/few_tokens.cuh"

namespace {
struct Shared : ProductMemory {
  uint32 active[num_warps];
  uint16 neuron[max_section];
};

struct Problem : FewTokens {
  float threshold;
  bool relu_up;  // dReLU
  element* value;     // of this section, as `neuron`
  uint16* neuron;
};

// The activation of two tokens, of which `present` exist: a value that is not above the threshold once
// it is rounded becomes zero, as does a token past M. NaN passes.
__device__ __forceinline__ uint32 apply_threshold(float low, float high, float threshold, int present) {
  const uint32 pair = pack_elements(low, high);
  const bool no_low = present < 1 || element_low(pair) <= threshold;
  const bool no_high = present < 2 || element_high(pair) <= threshold;
  return activated(pair & (no_low ? 0xffff0000u : ~0u) & (no_high ? 0x0000ffffu : ~0u));
}

// gate * (up + add), pairwise; with `relu` of the sum.
__device__ __forceinline__ uint32 product(uint32 gate, uint32 up, float add, bool relu) {
  const float low = element_low(up) + add, high = element_high(up) + add;
  return pack_elements(element_low(gate) * (relu && low < 0.0f ? 0.0f : low),
                   element_high(gate) * (relu && high < 0.0f ? 0.0f : high));
}

// Keeps the neurons of one round that are active, after `count` earlier ones. `first_row`: of the round.
template <int octets, typename Weight>
__device__ __forceinline__ uint32 store_active(Shared& shared, const Problem& p,
                                               const Rows<Weight>& rows,
                                               const Sums<octets>& d, int first,
                                               uint32 first_row, uint32 count) {
  const Place<octets> place;
  const uint32 row = first_row + place.tile * tile_rows + place.row;
  const float add = rows.add(row);
  float4 sum = add_up<octets>(shared, d, first);
  const float times = rows.times(row);
  sum = make_float4(sum.x * times, sum.y * times, sum.z * times, sum.w * times);
  // How many of this thread's four tokens exist.
  const int tokens = row < rows.num ? static_cast<int>(p.m) - place.first_token : 0;
  const uint2 gate = make_uint2(apply_threshold(sum.x + add, sum.y + add, p.threshold, tokens),
                                apply_threshold(sum.z + add, sum.w + add, p.threshold, tokens - 2));
  const uint32 ballot = __ballot_sync(~0u, ((gate.x | gate.y) & 0x7fff7fffu) != 0);
  if (place.lane == 0) shared.active[place.warp] = ballot;
  __syncthreads();
  uint32 own = 0;
  uint32 before = count;
#pragma unroll
  for (int tile = 0; tile < Place<octets>::round_tiles; ++tile) {
    uint32 active = 0;
#pragma unroll
    for (int octet = 0; octet < octets; ++octet) active |= shared.active[tile * octets + octet];
    active = (active | active >> 1) & 0x55555555u;  // bit 2r: row r
    if (tile == place.tile) {
      own = active;
      before = count;
    }
    count += __popc(active);
  }
  const uint32 bit = 1u << 2 * place.row;
  if ((own & bit) != 0) {
    const uint32 to = before + __popc(own & (bit - 1));
    *place.in(p.value, to) = gate;
    if (place.first_token == 0)
      shared.neuron[to] = p.neuron[to] = static_cast<uint16>(rows.at(row));
  }
  return count;
}

// The gate's values of one round's rows, times their sums.
template <int octets>
__device__ __forceinline__ void multiply_gate(Shared& shared, const Problem& p,
                                              const Rows<element>& rows,
                                              const Sums<octets>& d, int first,
                                              uint32 first_row) {
  const Place<octets> place;
  const uint32 row = first_row + place.tile * tile_rows + place.row;
  const float add = rows.add(row);
  const uint2 gate = row < rows.num ? *place.in(p.value, row) : make_uint2(0, 0);
  const float4 sum = add_up<octets>(shared, d, first);
  if (row < rows.num)
    *place.in(p.value, row) =
        make_uint2(product(gate.x, pack_elements(sum.x, sum.y), add, p.relu_up),
                   product(gate.y, pack_elements(sum.z, sum.w), add, p.relu_up));
  __syncthreads();  // the next round overwrites the sums
}

// Prefetches the rows of W_down that decode_down will read into L2. One tile of them at most: if
// all neurons are active, more would evict weights that this kernel has not read yet.
__device__ __forceinline__ void prefetch_down(const Shared& shared, const element* w_down, uint32 k,
                                              uint32 count) {
  constexpr int sector = 16;  // elements in 32 bytes
  for (uint32 i = threadIdx.x / 32; i < min(count, tile_rows); i += num_warps) {
    const element* row = w_down + static_cast<uint64>(shared.neuron[i]) * k;
    for (uint32 at = threadIdx.x % 32 * sector; at < k; at += 32 * sector)
      prefetch_to_l2(row + at);
  }
}

// Computes the gate of all rows of a section and returns how many are not zero; or up of those `count`
// rows.
template <bool gate, int octets, typename Weight>
__device__ __forceinline__ uint32 product_of(Shared& shared, const Problem& p,
                                             const Rows<Weight>& rows, const element* w_down,
                                             uint32 count) {
  Copies<Weight, octets> copies(shared, rows, p.k);
  if (gate)
    await_previous_kernel();  // which does not write the weights: their copies are under way
  else
    prefetch_down(shared, w_down, p.k, count);
  for_each_round(shared, copies, rows, p, [&](const Sums<octets>& d, int first, uint32 first_row) {
    if constexpr (gate)
      count = store_active<octets>(shared, p, rows, d, first, first_row, count);
    else
      multiply_gate<octets>(shared, p, rows, d, first, first_row);
  });
  return count;
}

// All that a block does; `value` holds all sections.
struct Section {
  Shared& shared;
  const Rows<stored_weight>& rows;
  const element *x, *w_up, *bias_up, *w_down;
  uint32 m, k;
  float threshold;
  bool relu_up;
  element* value;
  uint16* neuron;
  uint32* count;

  template <int octets>
  __device__ __forceinline__ void run() const {
    const Problem p{{x, m, k}, threshold, relu_up,
                    value + static_cast<uint64>(rows.first) * (8 * octets), neuron};
    const uint32 own = product_of<true, octets>(shared, p, rows, w_down, 0);
    if (w_up != nullptr && own != 0) {
      __syncthreads();  // the list, and the gate's values
      const Rows<element> active_rows{w_up, nullptr, bias_up, shared.neuron, 0, own};
      product_of<false, octets>(shared, p, active_rows, w_down, own);
    }
    if (threadIdx.x == 0) *count = own;
  }
};
}  // namespace

// `scale_N`: of each row of W, if it is of e4m3.
extern "C" __global__ void __launch_bounds__(block_threads, 1)
    decode_gate(const element* x_MK, const stored_weight* w_NK, const element* bias_N,
                const element* w_up_NK, const element* bias_up_N, const element* w_down_NK,
                uint32 m, uint32 n, uint32 k, float threshold, int relu_up, uint32 stride,
                uint32* count, uint16* neuron, element* value, const float* scale_N) {
  Shared& shared = dynamic_shared<Shared>();
  admit_next_kernel();
  const uint32 first = first_neuron(blockIdx.x, gridDim.x, n);
  const uint32 end = first_neuron(blockIdx.x + 1, gridDim.x, n);
  const Rows<stored_weight> rows{w_NK, scale_N, bias_N, nullptr, first, end - first};
  with_octets(m, Section{shared, rows, x_MK, w_up_NK, bias_up_N, w_down_NK, m, k, threshold,
                         relu_up != 0, value, neuron + blockIdx.x * stride, count + blockIdx.x});
}

extern "C" __device__ const uint32 exported_max_sections = max_sections,
                                   exported_max_section = max_section,
                                   exported_shared_bytes = sizeof(Shared);
