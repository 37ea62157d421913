// union_entries: strings the unions of each token block together (union.cuh: `entry`, `total`).
//
// One block of threads a token block. Also shares out the work of the two kernels after it; the
// order of units and of blocks within a class differs from run to run, the results do not.
#include "union.cuh"

extern "C" __global__ void __launch_bounds__(256)
    union_entries(const uint32* count, const unsigned char* neuron, int tiles_n, uint32* entry,
                  uint32* total, uint2* unit, uint2* order, uint32* control, uint32* observed) {
  extern __shared__ uint32 start[];  // [tiles_n + 1]
  __shared__ uint32 class_start[classes];
  __shared__ bool last;
  await_previous_kernel();
  const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    uint32 before = 0;
    for (int first = 0; first < tiles_n; first += 32) {
      const int tile = first + lane;
      const uint32 own = tile < tiles_n ? count[block * tiles_n + tile] : 0;
      uint32 sum = own;
      for (int step = 1; step < 32; step *= 2) {
        const uint32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      if (tile < tiles_n) start[tile + 1] = before + sum;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) {
      start[0] = 0;
      total[block] = before;
      atomicAdd(control + num_entries, before);
      const uint32 chunks = (before + 255) / 256;
      const uint32 place = atomicAdd(control + num_units, chunks);
      for (uint32 chunk = 0; chunk < chunks; ++chunk)
        unit[place + chunk] = make_uint2(block << 16 | chunk, before - chunk * 256);
      atomicAdd(control + class_size + class_of(before), 1);
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

  // The last block to come here puts the blocks in order.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(control + finished, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (warp == 0) {
    uint32 before = 0;
    const uint32 size = lane < classes ? __ldcg(control + class_size + lane) : 0;
    for (int smaller = 0; smaller < classes; ++smaller) {
      const uint32 other = __shfl_sync(0xffffffffu, size, smaller);
      before += smaller < lane ? other : 0;
    }
    if (lane < classes) class_start[lane] = before;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    const uint32 members = __ldcg(total + i);
    order[atomicAdd(class_start + class_of(members), 1)] = make_uint2(i, members);
  }
  // Memory of the host, which reads it when it likes.
  if (threadIdx.x == 0 && observed != nullptr)
    *observed = __ldcg(control + num_entries) / gridDim.x;
}

extern "C" __device__ const uint32 union_entries_shared_bytes = 4 * (65536 / tile_neurons + 1);
