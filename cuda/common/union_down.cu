// union_down: y = h · W + b, h in the union format (UnionDown of row_sums.cuh has what, down.cuh of an
// architecture how).
#include "common/row_sums.cuh"
#include "down.cuh"

extern "C" __global__ void __launch_bounds__(block_threads, blocks_per_multiprocessor)
    union_down(const element* w_NK, const element* bias_K, int m, int k, int tiles_n,
               const uint32* entry, const uint2* order, const uint2* split, uint32* arrived,
               float* sums, uint32* control, const element* value, const int* token_M,
               element* y_MK) {
  const SumWork work{order, split, arrived, sums, control};
  run(UnionDown{entry, value, w_NK, tiles_n}, bias_K, m, k, work, token_M, y_MK);
}
