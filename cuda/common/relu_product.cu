// relu_product: h = relu(gate) * up, or * relu(up), or relu(gate) alone, dense; what dispatch runs between two
// cuBLAS products where the pattern is too dense for the sparse kernels. Eight values per thread.
#include "common/activation.cuh"

namespace {
constexpr int threads = 256, values = 8;

// What is not above the threshold becomes zero; NaN passes.
__device__ __forceinline__ float apply_threshold(float gate, float threshold, float value) {
  return gate <= threshold ? 0.0f : value;
}

__device__ __forceinline__ uint32 product(uint32 gate, uint32 up, float threshold, bool relu_up) {
  if (relu_up) up = relu_elements(up);
  const uint32 value = activated(gate);
  return pack_elements(
      apply_threshold(element_low(gate), threshold, element_low(value)) * element_low(up),
      apply_threshold(element_high(gate), threshold, element_high(value)) * element_high(up));
}
}  // namespace

extern "C" __global__ void __launch_bounds__(threads)
    relu_product(const uint4* gate, const uint4* up, uint4* h, uint64 num_octets, float threshold,
                 int relu_up) {
  await_previous_kernel();
  const uint64 octet = static_cast<uint64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (octet >= num_octets) return;
  const uint4 g = gate[octet];
  const uint4 u = up == nullptr ? make_uint4(two_ones, two_ones, two_ones, two_ones) : up[octet];
  h[octet] = make_uint4(
      product(g.x, u.x, threshold, relu_up != 0), product(g.y, u.y, threshold, relu_up != 0),
      product(g.z, u.z, threshold, relu_up != 0), product(g.w, u.w, threshold, relu_up != 0));
}

extern "C" __device__ const uint32 exported_values = values;
