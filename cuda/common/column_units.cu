// column_units: schedules the work on columns (columns.cuh): the units of columns_grad and the order
// of columns_down, as union_entries does for the union format. One block of threads.
#include "common/units.cuh"

constexpr int threads = 1024;

extern "C" __global__ void __launch_bounds__(threads)
    column_units(const uint32* offset, int blocks, uint2* unit, uint2* order, uint2* split,
                 uint32* arrived, int max_parts, int slices, int workers, uint32* control) {
  __shared__ UnitSchedule units;
  await_previous_kernel();
  if (threadIdx.x < control_words) control[threadIdx.x] = 0;
  __syncthreads();
  schedule_units<threads>(units, blocks, [&](int i) { return offset[i + 1] - offset[i]; }, unit, order,
                       Splitting{split, arrived, max_parts, slices, workers}, control);
}

extern "C" __device__ const uint32 exported_members = unit_members, exported_min_part = min_part_members;
