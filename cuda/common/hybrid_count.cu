// hybrid_count: for how many ELL rows of the hybrid format (common/hybrid.cuh) each neuron is active;
// hybrid_place comes next.
#include "common/block_sums.cuh"
#include "common/hybrid.cuh"

namespace {
constexpr int threads = 128;

struct Shared {
  uint32 sum[threads / 32];
  bool last;
};

// Stores each neuron's number of rows in `first`, to be added up.
__device__ __forceinline__ void count_rows(int n, int blocks, const unsigned char* table,
                                           uint32* before, uint32* first) {
  constexpr int ahead = 16;
  const int neuron = blockIdx.x * threads + threadIdx.x;
  if (neuron >= n) return;
  uint32 rows = 0;
  for (int start = 0; start < blocks; start += ahead) {
    uint32 own[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      own[i] = start + i < blocks ? table[static_cast<uint64>(start + i) * n + neuron] : 0;
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (start + i < blocks) before[static_cast<uint64>(start + i) * n + neuron] = rows;
      rows += own[i];
    }
  }
  first[neuron] = rows;
}

// `first` becomes the sum of what it was before each neuron; one block of threads.
__device__ __forceinline__ void add_up(Shared& shared, int n, uint32* first) {
  uint32 before = 0;
  for (int base = 0; base < n; base += threads) {
    const int own = base + threadIdx.x;
    const Sums sums = sum_threads(shared.sum, own < n ? __ldcg(first + own) : 0);
    if (own < n) first[own] = before + sums.before;
    before += sums.total;
  }
  if (threadIdx.x == 0) first[n] = before;
}
}  // namespace

// A thread for each neuron counts the rows for which it is active before each token block; the last block adds
// up the neurons, for `first`.
extern "C" __global__ void __launch_bounds__(threads)
    hybrid_count(int n, int blocks, const unsigned char* table, uint32* before, uint32* first,
                 uint32* control) {
  __shared__ Shared shared;
  await_previous_kernel();
  count_rows(n, blocks, table, before, first);
  if (is_last_block(shared.last, control + num_finished)) add_up(shared, n, first);
}
