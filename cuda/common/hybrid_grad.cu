// hybrid_grad, hybrid_grad_x: the gradients of gate and up, then that of x, on the ELL rows of the hybrid
// format (common/hybrid.cuh; common/walk.cuh says how).
//
// ∇h = ∇y · W_downᵀ at their non-zeros, + λ · sign(h) for the L1 term, λ being the gradient of Σ|h|;
// ∇up = ∇h * gate, ∇gate = ∇h * up * slope(gate); then ∇x = ∇up · W_up + ∇gate · W_gate. Without a gate
// ∇up = ∇h * slope(h) + λ, the gradient of Σ relu(z).
// `pair` keeps ∇up in the low half and ∇gate in the high one.
#include "common/activation.cuh"
#include "common/hybrid.cuh"

extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_grad(const element* dy_MK, const uint32* word, const uint32* count, int width,
                int rows_each, const element* up, const element* w_down_NK, const float* l1, int m,
                int k, const int* token, uint32* pair) {
  __shared__ List list;
  await_previous_kernel();
  const Ell ell{{rows_each, m}, word, count, static_cast<uint32>(width)};
  const float lambda = *l1;
  concatenate_rows(list, ell, [&](uint64) { return 0u; });
  dot_rows(list, ell.rows, dy_MK, RowsByToken{token, ell.first_row}, w_down_NK, k);
  __syncthreads();
  each_entry(list, ell, [&](const Entry& entry, uint64 place) {
    const float gate = word_value(entry.word), sum = __uint_as_float(entry.factor);
    if (up != nullptr) {
      const float own = element_low(up[place]);
      const float h = element_low(pack_elements(gate * own, 0.0f));
      const float d_h = sum + (h == 0.0f ? 0.0f : copysignf(lambda, h));
      pair[place] = pack_elements(d_h * gate, d_h * own * slope(gate));
    } else {
      pair[place] = pack_elements(sum * slope(gate) + lambda, 0.0f);
    }
  });
}

extern "C" __global__ void __launch_bounds__(walk_threads, 4)
    hybrid_grad_x(const uint32* word, const uint32* count, int width, int rows_each,
                  const uint32* pair, const element* w_up_NK, const element* w_gate_NK, int m, int k,
                  int slices, element* dx_MK) {
  __shared__ List list;
  await_previous_kernel();
  const Ell ell{{rows_each, m}, word, count, static_cast<uint32>(width)};
  concatenate_rows(list, ell, [&](uint64 place) { return pair[place]; });
  const RowsByToken rows{nullptr, ell.first_row};
  const ColumnRange range = columns_of(ell.slice, slices, k);
  if (w_gate_NK != nullptr)
    sum_rows(list, ell.rows, nullptr, k, range, dx_MK, rows, Factors<element_low>{w_up_NK},
             Factors<element_high>{w_gate_NK});
  else
    sum_rows(list, ell.rows, nullptr, k, range, dx_MK, rows, Factors<element_low>{w_up_NK});
}
