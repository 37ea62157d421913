// The interface between decode_gate and decode_down: the neurons active for any of up to 64 tokens.
//
// The N neurons are divided into sections of nearly equal size: section s has neurons N·s/sections to
// N·(s+1)/sections and is computed by one block of decode_gate. T is the number of tokens, padded to 8,
// 16, 32 or 64. For each section, in ascending order:
//
//   count   [sections]          uint32   how many of its neurons are active
//   neuron  [sections][stride]  uint16   which; stride is a multiple of 16, so that two 16-byte
//                                        loads have the first 16
//   value   [N][T]              element  their h, the i-th in row `first_neuron` + i; tokens past
//                                        M are zeros
//
// Values past `count` in a section are undefined.
#pragma once
#include "common/mma.cuh"
#include "common/tiles.cuh"

using namespace decode_tiles;
constexpr int block_threads = 32 * num_warps;
constexpr int max_sections = block_threads;  // decode_down gives a thread to each
static_assert(max_sections * uint64(max_section) >= max_neurons, "sections hold all neurons");
static_assert(uint64(max_sections) * max_neurons <= 1u << 24, "first_neuron multiplies in 32 bits");
static_assert(max_decode_tokens == 8 * 8, "with_octets has up to eight octets");

__device__ __forceinline__ uint32 first_neuron(uint32 section, uint32 sections, uint32 n) {
  return section * n / sections;  // below 2^24 before the division
}

// Adds what another warp has summed up.
__device__ __forceinline__ void add_share(float4& sum, float4 share) {
  sum.x += share.x;
  sum.y += share.y;
  sum.z += share.z;
  sum.w += share.w;
}

// Runs `kernel` with the number of token octets that T stands for, as a compile-time constant. A
// member template, since NVRTC before 13 takes no generic lambda in a kernel.
template <typename Kernel>
__device__ __forceinline__ void with_octets(int tokens, const Kernel& kernel) {
  if (tokens <= 8)
    kernel.template run<1>();
  else if (tokens <= 16)
    kernel.template run<2>();
  else if (tokens <= 32)
    kernel.template run<4>();
  else
    kernel.template run<8>();
}
