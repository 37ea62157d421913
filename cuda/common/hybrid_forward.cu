// hybrid_up, hybrid_down: y = h · W on the ELL rows of the hybrid format (common/hybrid.cuh), W neuron by
// neuron: W_downᵀ as `nn.Linear` stores it; h = gate * (x · W_upᵀ) at their non-zeros, the sampled product
// first (common/walk.cuh says how). They keep x · W_upᵀ, and add up |h|. Without W_up the gate is h, only
// hybrid_down runs, and it adds up relu(z). Rows of the backup are zero, until dense_rows fills them in.
#include "common/activation.cuh"
#include "common/hybrid.cuh"

namespace {
__device__ __forceinline__ float h_of(uint32 word, element up) {
  return element_low(pack_elements(word_value(word) * element_low(up), 0.0f));
}

// Stores the sum over a block's threads.
__device__ __forceinline__ void store_sum(float own, float* to) {
  __shared__ float of_warp[walk_warps];
  own = add_warp(own);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0) *to = of_warp[0] + of_warp[1] + of_warp[2] + of_warp[3];
}
}  // namespace

extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_up(const element* x_MK, const uint32* word, const uint32* count, int width, int rows_each,
              const element* w_up_NK, int m, int k, element* up, float* l1) {
  __shared__ List list;
  await_previous_kernel();
  const Ell ell{{rows_each, m}, word, count, static_cast<uint32>(width)};
  concatenate_rows(list, ell, [&](uint64) { return 0u; });
  dot_rows(list, ell.rows, x_MK, RowsByToken{nullptr, ell.first_row}, w_up_NK, k);
  __syncthreads();
  float sum = 0.0f;
  each_entry(list, ell, [&](const Entry& entry, uint64 place) {
    const float own = __uint_as_float(entry.factor);
    const element rounded = static_cast<element>(pack_elements(own, 0.0f));
    up[place] = rounded;
    sum += fabsf(h_of(entry.word, rounded));
  });
  store_sum(sum, l1 + ell.row_block);
}

// `up`: null without a gate; then `l1` is stored here.
extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_down(const uint32* word, const uint32* count, int width, int rows_each, const element* up,
                const element* w_down_NK, int m, int k, int slices, const int* token, float* l1,
                element* y_MK) {
  __shared__ List list;
  await_previous_kernel();
  const Ell ell{{rows_each, m}, word, count, static_cast<uint32>(width)};
  const bool gated = up != nullptr;
  concatenate_rows(list, ell, [&](uint64 place) {
    const uint32 own = ell.word[place];
    return __float_as_uint(gated ? h_of(own, up[place]) : word_value(own));
  });
  if (!gated && ell.slice == 0) {
    float sum = 0.0f;
    each_entry(list, ell, [&](const Entry& entry, uint64) { sum += inverse(word_value(entry.word)); });
    store_sum(sum, l1 + ell.row_block);
  }
  sum_rows(list, ell.rows, nullptr, k, columns_of(ell.slice, slices, k), y_MK,
           RowsByToken{token, ell.first_row}, FloatFactors{w_down_NK});
}
