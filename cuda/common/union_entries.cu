// union_entries: concatenates the unions of each token block (union.cuh: `entry`, `total`).
//
// One block of threads per token block; the last one schedules the work of the two next kernels. All
// of them fill up to four arrays with zeros, in which the next kernels count: launches of their own
// took the host about 20 µs each (recipe small, profiled, one H200).
#include "common/units.cuh"

constexpr int threads = 256;

extern "C" __global__ void __launch_bounds__(threads)
    union_entries(const uint32* count, const unsigned char* neuron, int tiles_n, uint32* entry,
                  uint32* total, uint2* unit, uint2* order, uint2* split, uint32* arrived,
                  int max_parts, int slices, int workers, uint32* control, uint32* observed,
                  uint32* zeroed_0, int words_0, uint32* zeroed_1, int words_1, uint32* zeroed_2,
                  int words_2, uint32* zeroed_3, int words_3) {
  extern __shared__ uint32 start[];  // [tiles_n + 1]
  __shared__ UnitSchedule units;
  __shared__ bool last;
  await_previous_kernel();
  const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const struct {
    uint32* array;  // or null
    int words;
  } zeroed[] = {{zeroed_0, words_0}, {zeroed_1, words_1}, {zeroed_2, words_2}, {zeroed_3, words_3}};
#pragma unroll
  for (int k = 0; k < 4; ++k)
    for (int i = block * threads + threadIdx.x; i < zeroed[k].words; i += gridDim.x * threads)
      zeroed[k].array[i] = 0;
  if (warp == 0) {
    uint32 before = 0;
    for (int first = 0; first < tiles_n; first += 32) {
      const int tile = first + lane;
      const uint32 own = tile < tiles_n ? count[block * tiles_n + tile] : 0;
      const uint32 sum = sum_to_lane(own);
      if (tile < tiles_n) start[tile + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) {
      start[0] = 0;
      total[block] = before;
      atomicAdd(control + num_entries, before);
    }
  }
  __syncthreads();
  uint32* out = entry + static_cast<uint64>(block) * tiles_n * tile_neurons;
  for (int tile = warp; tile < tiles_n; tile += 8) {
    const uint64 place = static_cast<uint64>(block) * tiles_n + tile;
    const uint32 first = start[tile], members = start[tile + 1] - first;
    for (uint32 i = lane; i < members; i += 32)
      out[first + i] = entry_of(tile * tile_neurons + i,
                                tile * tile_neurons + neuron[place * tile_neurons + i]);
  }

  if (!is_last_block(last, control + finished)) return;
  schedule_units<threads>(units, gridDim.x, [&](int i) { return __ldcg(total + i); }, unit, order,
                       Splitting{split, arrived, max_parts, slices, workers}, control);
  // Host memory, which the host reads asynchronously.
  if (threadIdx.x == 0 && observed != nullptr)
    *observed = __ldcg(control + num_entries) / gridDim.x;
}

extern "C" __device__ const uint32 exported_shared_bytes = 4 * (max_neurons / tile_neurons + 1);
