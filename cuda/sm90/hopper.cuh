// Thin names for the PTX that Hopper has beyond common/ptx.cuh: mbarriers, clusters, bulk tensor
// copies, register budgets of warpgroups. Sections follow the PTX ISA manual.
#pragma once
#include "common/ptx.cuh"

// --- warpgroups ----------------------------------------------------------------------------------

// Of all kernels here: warpgroup 0 produces, the others consume.
constexpr int warpgroup_threads = 128, num_consumers = 2;
constexpr int producer_threads = warpgroup_threads, consumer_threads = num_consumers * warpgroup_threads;

// Registers are allocated to warps by eights; at the start all threads have equally many. A warpgroup
// that asks for more waits until others have given up theirs: for ever, if they never do.
template <int of_producer, int of_consumer>
constexpr bool registers_fit =
    of_producer % 8 == 0 && of_consumer % 8 == 0 && of_consumer <= 255 &&
    of_producer * producer_threads + of_consumer * consumer_threads <=
        65536 / (producer_threads + consumer_threads) / 8 * 8 * (producer_threads + consumer_threads);

// Where the operands of wgmma and the boxes of TMA lie: the 128-byte swizzle repeats every 1024 bytes.
constexpr int swizzle_bytes = 128, swizzle_repeat = 8 * swizzle_bytes;

// The dynamic shared memory of a block, aligned to that, and the bytes to ask for.
template <typename Shared>
__device__ __forceinline__ Shared& swizzled_shared() {
  extern __shared__ unsigned char raw[];
  return *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(raw) + swizzle_repeat - 1) &
                                    ~static_cast<uint64>(swizzle_repeat - 1));
}
template <typename Shared>
constexpr uint32 aligned_bytes = sizeof(Shared) + swizzle_repeat;

template <typename Shared>
constexpr bool fits = aligned_bytes<Shared> <= SPARSELLM_SHARED_KIB * 1024;

// --- named barriers ------------------------------------------------------------------------------

// Of a block of threads; __syncthreads is number 0.
constexpr int consumer_barrier = 1;

template <int barrier, int threads>
__device__ __forceinline__ void named_barrier_sync() {
  static_assert(barrier > 0 && barrier < 16 && threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

// --- mbarrier ------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64* barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

// Arrives at the barrier of the same name in block `rank` of the cluster. It orders no memory of
// this block for the other: cluster scope would cost two membars a call (H200, gate_union at
// 16384 × 2048 × 5632: a third of its time), and shared memory that wgmma has read needs none.
__device__ __forceinline__ void mbarrier_arrive_remote(uint64* barrier, uint32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
          smem_address(barrier)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64* barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   smem_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// --- cluster -------------------------------------------------------------------------------------

__device__ __forceinline__ uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier for all threads of the cluster. `.aligned` requires whole warps to arrive together; after
// a divergent branch they would not without the __syncwarp.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- bulk tensor copies (TMA) --------------------------------------------------------------------

// Copies the box at (column, row) into shared memory and counts its bytes at `barrier`.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64* barrier, int column,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(to)),
      "l"(&map), "r"(smem_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same into every block of the cluster whose bit is set, at the same offset, counted at each
// block's own barrier.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64* barrier,
                                                   int column, int row, uint16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(to)),
      "l"(&map), "r"(smem_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// --- cp.async and the asynchronous proxy -----------------------------------------------------------

// Arrives at the barrier once all copies that this thread has issued so far are done.
__device__ __forceinline__ void copy_arrive(uint64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

// Orders writes to shared memory by ordinary stores and cp.async, this thread's or seen by it
// through a barrier, before reads by wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- warps ---------------------------------------------------------------------------------------

template <int registers>
__device__ __forceinline__ void registers_increase() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void registers_decrease() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Writes four 8×8 matrices of 16-bit elements, held as in `transpose_8x8`, column by column: lane l
// names the 16 bytes of column l%8 of matrix l/8.
__device__ __forceinline__ void store_transposed(uint32 to, uint32 a, uint32 b, uint32 c,
                                                 uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
