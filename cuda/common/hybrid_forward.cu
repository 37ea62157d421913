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

extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_forward(const element* x_MK, const uint32* word, const uint32* count, int width,
                   int rows_each, const element* w_up_NK, const element* b_up_N,
                   const element* w_down_NK, const element* b_down_K, int m, int k,
                   const int* token, element* up, float* l1, element* y_MK) {
  __shared__ Shared shared;
  await_previous_kernel();
  List& list = shared.list;
  const Ell ell(word, count, width, rows_each, m);
  const bool gated = w_up_NK != nullptr;
  concatenate_rows(list, ell, [&](uint64) { return 0u; });
  if (gated) {
    dot_rows(list, ell.rows, x_MK, RowsByToken{nullptr, ell.first}, w_up_NK, k);
    __syncthreads();
  }
  float sum = 0.0f;
  each_entry(list, ell, [&](Entry& entry, uint64 place) {
    float h = word_value(entry.word);
    if (gated) {
      float own = __uint_as_float(entry.factor);
      if (b_up_N != nullptr) own += element_low(b_up_N[word_neuron(entry.word)]);
      const uint32 rounded = pack_elements(own, 0.0f);
      up[place] = static_cast<element>(rounded);
      h = element_low(pack_elements(h * element_low(rounded), 0.0f));
    }
    entry.factor = __float_as_uint(h);
    sum += fabsf(h);
  });
  sum = add_warp(sum);
  if (threadIdx.x % 32 == 0) shared.l1[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    l1[blockIdx.x] = shared.l1[0] + shared.l1[1] + shared.l1[2] + shared.l1[3];
  sum_rows(list, ell.rows, b_down_K, k, y_MK, RowsByToken{token, ell.first},
           FloatFactors{w_down_NK});
}

extern "C" __device__ const uint32 hybrid_forward_threads = walk_threads;
extern "C" __device__ const uint32 hybrid_forward_shared_bytes = 0;
