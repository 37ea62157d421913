// decode_linear: y = x · Wᵀ + b for up to 64 tokens, of one to three matrices that multiply the same x,
// such as those of queries, keys and values: their results are neighbouring columns of y.
//
// Bound by reading the weights (few_tokens.cuh). A block owns consecutive rows of one matrix; its first
// copies are under way while the kernel before ends.
#include "common/few_tokens.cuh"

namespace {
template <int octets>
__device__ __forceinline__ void store(ProductMemory& shared, const FewTokens& p,
                                      const Rows<stored_weight>& rows, const Sums<octets>& d,
                                      int first, uint32 first_row, element* y, uint32 stride) {
  const Place<octets> place;
  const uint32 row = first_row + place.tile * tile_rows + place.row;
  const float add = rows.add(row), times = rows.times(row);
  const float4 sum = add_up<octets>(shared, d, first);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  if (row < rows.num) {
#pragma unroll
    for (uint32 i = 0; i < 4; ++i) {
      const uint32 token = place.first_token + i;
      if (token < p.m)
        y[static_cast<uint64>(token) * stride + rows.at(row)] =
            static_cast<element>(pack_elements(sums[i] * times + add, 0.0f));
    }
  }
  __syncthreads();  // the next round overwrites the sums
}

struct Product {
  ProductMemory& shared;
  const FewTokens& p;
  const Rows<stored_weight>& rows;
  element* y;  // of this matrix
  uint32 stride;

  template <int octets>
  __device__ __forceinline__ void run() const {
    Copies<stored_weight, octets> copies(shared, rows, p.k);
    await_previous_kernel();  // which does not write the weights
    for_each_round(shared, copies, rows, p, [&](const Sums<octets>& d, int first, uint32 first_row) {
      store<octets>(shared, p, rows, d, first, first_row, y, stride);
    });
  }
};

struct Matrix {
  const stored_weight* w;
  const float* scale;  // of each row, if the weights are e4m3
  const element* bias;   // or null
  uint32 n;            // rows
};

// This block's part of matrix 0, 1 or 2.
template <bool wide>
__device__ __forceinline__ void linear(const element* x_MK, const Matrix (&matrix)[3], uint32 m,
                                       uint32 k, uint32 blocks_0, uint32 blocks_1, element* y_MN) {
  ProductMemory& shared = dynamic_shared<ProductMemory>();
  admit_next_kernel();
  uint32 block = blockIdx.x, blocks = blocks_0, column = 0;
  Matrix own = matrix[0];
  if (block >= blocks_0 + blocks_1) {
    block -= blocks_0 + blocks_1;
    blocks = gridDim.x - blocks_0 - blocks_1;
    column = matrix[0].n + matrix[1].n;
    own = matrix[2];
  } else if (block >= blocks_0) {
    block -= blocks_0;
    blocks = blocks_1;
    column = matrix[0].n;
    own = matrix[1];
  }
  const uint32 first = first_neuron(block, blocks, own.n), end = first_neuron(block + 1, blocks, own.n);
  const Rows<stored_weight> rows{own.w, own.scale, own.bias, nullptr, first, end - first};
  const FewTokens p{x_MK, m, k};
  const Product product{shared, p, rows, y_MN + column, matrix[0].n + matrix[1].n + matrix[2].n};
  if constexpr (!wide)
    product.run<1>();
  else if (m <= 16)
    product.run<2>();
  else if (m <= 32)
    product.run<4>();
  else
    product.run<8>();
}
}  // namespace

// Matrix i has n_i rows, which the next blocks_i blocks divide evenly; the last has the other blocks.
// For up to 8 tokens, two kernels fit a multiprocessor: the next one's copies begin during this one.
extern "C" __global__ void __launch_bounds__(block_threads, 2)
    decode_linear(const element* x_MK, const stored_weight* w_0, const stored_weight* w_1,
                  const stored_weight* w_2, const float* scale_0, const float* scale_1,
                  const float* scale_2, const element* bias_0, const element* bias_1,
                  const element* bias_2, uint32 m, uint32 k, uint32 n_0, uint32 n_1, uint32 n_2,
                  uint32 blocks_0, uint32 blocks_1, element* y_MN) {
  linear<false>(x_MK,
                {{w_0, scale_0, bias_0, n_0}, {w_1, scale_1, bias_1, n_1}, {w_2, scale_2, bias_2, n_2}},
                m, k, blocks_0, blocks_1, y_MN);
}

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    decode_linear_wide(const element* x_MK, const stored_weight* w_0, const stored_weight* w_1,
                       const stored_weight* w_2, const float* scale_0, const float* scale_1,
                       const float* scale_2, const element* bias_0, const element* bias_1,
                       const element* bias_2, uint32 m, uint32 k, uint32 n_0, uint32 n_1,
                       uint32 n_2, uint32 blocks_0, uint32 blocks_1, element* y_MN) {
  linear<true>(x_MK,
               {{w_0, scale_0, bias_0, n_0}, {w_1, scale_1, bias_1, n_1}, {w_2, scale_2, bias_2, n_2}},
               m, k, blocks_0, blocks_1, y_MN);
}

extern "C" __device__ const uint32 exported_shared_bytes = sizeof(ProductMemory);
