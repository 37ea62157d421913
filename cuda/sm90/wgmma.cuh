// wgmma m64nNk16, elements in, fp32 out, both operands in shared memory with the 128-byte swizzle.
//
// D fragment: thread t of the warpgroup has rows 16(t/32) + (t%32)/4 (elements 4j, 4j+1) and 8 below
// (4j+2, 4j+3) of columns 8j + 2(t%4) and the next.
#pragma once
#include "common/element.cuh"

// Descriptor of an operand tile. `start` is 16-byte aligned within a 1024-byte aligned tile.
// K-major (rows of 64 k, 128 bytes): `panel` is not used. MN-major (rows of 64 m or n, 128 bytes,
// one per k): `panel` is the bytes from 64 m or n to the next 64.
__device__ __forceinline__ uint64 operand(uint32 start, uint32 panel = 0) {
  static_assert(sizeof(element) == 2, "64 of them are the span of the swizzle");
  constexpr uint64 swizzle_128b = 1ull << 62, from_8_rows_to_the_next = 8 * 128;
  return swizzle_128b | from_8_rows_to_the_next >> 4 << 32 |
         (static_cast<uint64>(panel >> 4) << 16) | ((start & 0x3ffffu) >> 4);
}

// Before the first wgmma after registers were written by other instructions.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The sums as they stand in an instruction, and as its operands, which are the first.
#define SUMS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 \
  SUMS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OPERANDS_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPERANDS_32(d, i) \
  OPERANDS_8(d, i), OPERANDS_8(d, i + 8), OPERANDS_8(d, i + 16), OPERANDS_8(d, i + 24)
#define OPERANDS_64(d, i) OPERANDS_32(d, i), OPERANDS_32(d, i + 32)

__device__ __forceinline__ void wgmma_n128(float (&d)[64], uint64 a, uint64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" SUMS_64 "}, "
      "%64, %65, accumulate, 1, 1, 0, 0;\n}"
      : OPERANDS_64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// `transposed`: 1 if both operands are MN-major.
template <int transposed>
__device__ __forceinline__ void wgmma_n256(float (&d)[128], uint64 a, uint64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {" SUMS_128 "}, "
      "%128, %129, accumulate, 1, 1, %131, %131;\n}"
      : OPERANDS_64(d, 0), OPERANDS_64(d, 64)
      : "l"(a), "l"(b), "r"(accumulate), "n"(transposed));
}

// The same of m64n256k32: both operands e4m3, K-major (rows of 128 k).
__device__ __forceinline__ void wgmma_n256_e4m3(float (&d)[128], uint64 a, uint64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" SUMS_128 "}, "
      "%128, %129, accumulate, 1, 1;\n}"
      : OPERANDS_64(d, 0), OPERANDS_64(d, 64)
      : "l"(a), "l"(b), "r"(accumulate));
}
