// Thin names for the PTX that kernels of every architecture use (from sm_80 on). Everything here is
// one instruction or a short idiom.
#pragma once

// What cuTensorMapEncodeTiled fills; passed by value as a __grid_constant__ parameter. Only Hopper's
// kernels read it.
struct alignas(64) TensorMap {
  char opaque[128];
};

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

__device__ __forceinline__ uint32 smem_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Where 16 bytes, chunk `chunk` of a row of shared memory, lie: rows are `row_bytes` long, a power of
// two, and of 8 rows one chunk each is in banks of its own (128 bytes: TMA's and wgmma's swizzle).
template <int row_bytes>
__device__ __forceinline__ uint32 swizzled(int row, int chunk) {
  static_assert(row_bytes >= 16 && (row_bytes & (row_bytes - 1)) == 0);
  constexpr int banks = row_bytes < 128 ? row_bytes / 16 : 8;
  return row * row_bytes + ((chunk ^ row / (8 / banks) % banks) << 4);
}

// The dynamic shared memory of a block of threads.
template <typename Shared>
__device__ __forceinline__ Shared& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char raw[];
  static_assert(alignof(Shared) <= 128);
  static_assert(sizeof(Shared) <= SPARSELLM_SHARED_KIB * 1024, "more than a block can have");
  return *reinterpret_cast<Shared*>(raw);
}

// --- kernels that overlap ------------------------------------------------------------------------

// Waits until the kernel before in the stream has ended and its writes are visible. Every kernel
// calls it before it writes global memory, or reads any but a model's weights, which no kernel of ours
// writes in the same stream without others after it (sparsellm/ffn/kernels/launch.py).
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start while this one runs. Only for kernels whose blocks all fit at
// once: otherwise the next kernel's blocks would take the places of those that still wait.
__device__ __forceinline__ void admit_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- counters ------------------------------------------------------------------------------------

// atomicAdd(counter, 1) for one thread, below 2³¹. It uses atomicInc: the compiler would add up an
// atomicAdd over the warp, and so wait for its result at once.
__device__ __forceinline__ uint32 claim_next(uint32* counter) {
  uint32 taken;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(taken) : "l"(counter) : "memory");
  return taken;
}

// What other blocks of threads have written by the time they raised a counter is visible afterwards.
__device__ __forceinline__ uint32 load_acquire(const uint32* counter) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// True in the last block of threads to call it, for which the counter is: it sees what all others have
// written. `last` is shared memory.
__device__ __forceinline__ bool is_last_block(bool& last, uint32* finished) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  return true;
}

__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 64;" ::: "memory"); }

// --- cp.async ------------------------------------------------------------------------------------

// Begins to bring the 128-byte line of an address from memory to L2.
__device__ __forceinline__ void prefetch_to_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// 16 bytes from global to shared memory, past L1; `bytes` < 16 fills the rest with zeros.
__device__ __forceinline__ void copy16_async(uint32 to, const void* from, uint32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// A policy for what L2 evicts first: data that is read rarely, next to data that is read often.
__device__ __forceinline__ uint64 evict_first() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy16_async(uint32 to, const void* from, uint32 bytes,
                                             uint64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}

// --- warps ---------------------------------------------------------------------------------------

// The sum of `own` over the lanes up to this one. The whole warp calls it.
__device__ __forceinline__ uint32 sum_to_lane(uint32 own) {
  uint32 sum = own;
#pragma unroll
  for (uint32 step = 1; step < 32; step *= 2) {
    const uint32 below = __shfl_up_sync(~0u, sum, step);
    if (threadIdx.x % 32 >= step) sum += below;
  }
  return sum;
}

// The sum over a warp, for all its lanes.
__device__ __forceinline__ float add_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Transposes an 8×8 matrix of 16-bit elements that a warp holds: lane l has row l/4, columns
// 2(l%4) and 2(l%4)+1, in and out.
__device__ __forceinline__ uint32 transpose_8x8(uint32 pair) {
  uint32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Transposes 4×4 words across the lanes of a quad: word j of lane q becomes word q of lane j. Four
// neighbouring words of a row of sums (fragments: wgmma.cuh, mma.cuh) so come to one lane.
__device__ __forceinline__ uint4 transpose_quad(uint32 (&word)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & step) continue;
      uint32 &first = word[low], &second = word[low + step];
      const uint32 other = __shfl_xor_sync(~0u, upper ? first : second, step);
      (upper ? first : second) = other;
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
