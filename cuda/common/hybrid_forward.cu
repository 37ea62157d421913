// hybrid_forward: y = h · W + b on the ELL rows of the hybrid format (common/hybrid.cuh), W neuron by
// neuron: W_downᵀ as `nn.Linear` stores it; h = gate * (x · W_upᵀ + b) at their non-zeros, the sampled
// product first (common/walk.cuh has how). Keeps x · W_upᵀ + b, and adds up |h|. Without W_up the gate
// is h. Rows of the backup get the bias, until dense_rows fills them in.
#include "common/hybrid.cuh"

namespace {
struct Shared {
  List list;
  float l1[walk_warps];
};

__device__ __forceinline__ float add_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
}  // namespace

// part: 1: up and Σ|h|; 2: y from them, `slices` of its columns, each with blocks of threads for all
// rows: L2 then holds what is read of the weights at a time. Without W_up part 2 is all there is.
extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_forward(int part, const element* x_MK, const uint32* word, const uint32* count,
                   int width, int rows_each, const element* w_up_NK, const element* b_up_N,
                   const element* w_down_NK, const element* b_down_K, int m, int k, int slices,
                   const int* token, element* up, float* l1, element* y_MK) {
  __shared__ Shared shared;
  await_previous_kernel();
  List& list = shared.list;
  const Share share(rows_each, m);
  const Ell ell(word, count, width, share.row_block, rows_each, m);
  const bool gated = w_up_NK != nullptr;
  const auto h_of = [](uint32 word, element up) {
    return element_low(pack_elements(word_value(word) * element_low(up), 0.0f));
  };
  float sum = 0.0f;
  if (part == 1) {
    concatenate_rows(list, ell, [&](uint64) { return 0u; });
    dot_rows(list, ell.rows, x_MK, RowsByToken{nullptr, ell.first}, w_up_NK, k);
    __syncthreads();
    each_entry(list, ell, [&](const Entry& entry, uint64 place) {
      float own = __uint_as_float(entry.factor);
      if (b_up_N != nullptr) own += element_low(b_up_N[word_neuron(entry.word)]);
      const element rounded = static_cast<element>(pack_elements(own, 0.0f));
      up[place] = rounded;
      sum += fabsf(h_of(entry.word, rounded));
    });
  } else {
    concatenate_rows(list, ell, [&](uint64 place) {
      const uint32 own = ell.word[place];
      return __float_as_uint(gated ? h_of(own, up[place]) : word_value(own));
    });
    if (!gated)
      each_entry(list, ell, [&](const Entry& entry, uint64) { sum += word_value(entry.word); });
  }
  if (share.slice == 0 && (part == 1 || !gated)) {
    sum = add_warp(sum);
    if (threadIdx.x % 32 == 0) shared.l1[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
      l1[share.row_block] = shared.l1[0] + shared.l1[1] + shared.l1[2] + shared.l1[3];
  }
  if (part == 2)
    sum_rows(list, ell.rows, b_down_K, k, columns_of(share.slice, slices, k), y_MK,
             RowsByToken{token, ell.first}, FloatFactors{w_down_NK});
}

extern "C" __device__ const uint32 hybrid_forward_threads = walk_threads;
extern "C" __device__ const uint32 hybrid_forward_shared_bytes = 0;
