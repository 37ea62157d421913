// column_units: shares out the work on columns (columns.cuh): the units of columns_grad and the order
// of columns_down, as union_entries does for the union format. One block of threads.
#include "columns.cuh"

namespace {
constexpr int threads = 1024, unit_members = 256;
}

extern "C" __global__ void __launch_bounds__(threads)
    column_units(const uint32* offset, int blocks, uint2* unit, uint2* order, uint32* control) {
  __shared__ uint32 units, size[classes], start[classes];
  await_previous_kernel();
  if (threadIdx.x < 16) control[threadIdx.x] = 0;
  if (threadIdx.x < classes) size[threadIdx.x] = 0;
  if (threadIdx.x == 0) units = 0;
  __syncthreads();
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = offset[block + 1] - offset[block];
    const uint32 chunks = (members + unit_members - 1) / unit_members;
    const uint32 place = atomicAdd(&units, chunks);
    for (uint32 chunk = 0; chunk < chunks; ++chunk)
      unit[place + chunk] = make_uint2(block << 16 | chunk, members - chunk * unit_members);
    atomicAdd(size + class_of(members), 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    control[num_units] = units;
    for (int own = 0, before = 0; own < classes; ++own) {
      start[own] = before;
      before += size[own];
    }
  }
  __syncthreads();
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const uint32 members = offset[block + 1] - offset[block];
    order[atomicAdd(start + class_of(members), 1)] = make_uint2(block, members);
  }
}

extern "C" __device__ const uint32 column_units_shared_bytes = 0;
