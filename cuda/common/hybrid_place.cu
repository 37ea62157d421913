// hybrid_place: where in the ELL rows of the hybrid format (common/hybrid.cuh) each neuron's non-zeros are.
#include "common/hybrid.cuh"

namespace {
constexpr int threads = 128;
}

// A block for each token block stores where its non-zeros are, row by row. `active`: for how many of
// its rows each neuron has been active so far. A row's neurons differ, so that no two threads want the same one
// between two barriers.
extern "C" __global__ void __launch_bounds__(threads)
    hybrid_place(int m, int n, int width, const uint32* word, const uint32* count,
                 const uint32* before, const uint32* first, uint32* source) {
  extern __shared__ __align__(16) unsigned char active[];  // of each neuron
  await_previous_kernel();
  const int first_row = blockIdx.x * block_tokens, end = min(first_row + block_tokens, m);
  for (int i = threadIdx.x; i < n; i += threads) active[i] = 0;
  __syncthreads();
  for (int row = first_row; row < end; ++row) {
    for (uint32 j = threadIdx.x; j < count[row]; j += threads) {
      const uint32 place = row * static_cast<uint32>(width) + j, neuron = word_neuron(word[place]);
      const uint32 rank = active[neuron];
      active[neuron] = static_cast<unsigned char>(rank + 1);
      source[first[neuron] + before[static_cast<uint64>(blockIdx.x) * n + neuron] + rank] = place;
    }
    __syncthreads();
  }
}

extern "C" __device__ const uint32 exported_shared_bytes = max_neurons;
