// weight_grad: the weights' gradients of a sparse FFN, from columns in the order of group_columns and
// their values in the form of fill_pieces.
//
//   gate[n] = Σ d_gate · x[token]    up[n] = Σ d_up · x[token]    down[n] = Σ gate · up · dy[token]
//
// A work unit is 32 neurons × `unit_columns` of x or dy × some rows. It is a sum of rows as in down.cuh:
// the rows of x or dy take the place of weight rows, and the group's values (d_gate and d_up) take the
// place of the 64 tokens. Slices of columns come one after the other: a slice of all tokens fits
// into L2, and x as a whole does not (64 MB at 16384 × 2048).
//
// On real traces (16384 tokens, for each of which 16–44 neurons are active) a group's rows are 0.46–0.63 of its
// (token, neuron) pairs; of groups of 16, 0.56–0.74; of 64, 0.33–0.50 at twice the products.
//
// If a group of neurons is split, its parts' sums are added as in row_sums.cuh.
#include "weight_rows.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    weight_grad(const element* x_MK, const element* dy_MK, int k, int n, const uint32* order,
                const Unit* unit, const uint32* control, const uint2* work,
                const uint32* piece_x, const uint32* piece_dy, const element* piece_values,
                uint32* progress, float* sums, int gated, int is_float, int adds, void* gate_NK,
                void* up_NK, void* down_NK) {
  const int slices = (k + unit_columns - 1) / unit_columns;
  run(Arguments{k,       n,        slices,       gated != 0, x_MK, dy_MK,
                order,   unit,     work,         piece_x,    piece_dy,
                piece_values, progress, sums,    is_float != 0, gate_NK, up_NK, down_NK},
      control, adds != 0);
}
