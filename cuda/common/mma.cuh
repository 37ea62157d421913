// Tensor cores of every GPU since Ampere: mma.sync m16n8k16, elements in, fp32 out, and what feeds
// it.
//
// Fragments of lane l, q = l%4, g = l/4; two elements per register, the lower index in the low half:
//   A (16×16, row-major)  a[0]: row g, k 2q..2q+1     a[1]: row g+8, same k
//                         a[2]: row g, k 2q+8..2q+9   a[3]: row g+8, same k
//   B (16×8, k by n)      b[0]: column g, k 2q..2q+1  b[1]: column g, k 2q+8..2q+9
//   D (16×8, fp32)        d[0..1]: row g, columns 2q..2q+1   d[2..3]: row g+8
#pragma once
#include "common/element.cuh"

__device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8×8 matrices of 16-bit elements: lane l names the 16 bytes of row l%8 of matrix l/8, and
// gets of each matrix row l/4, columns 2(l%4) and the next.
__device__ __forceinline__ void load_matrices(uint32 (&to)[4], uint32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32 (&to)[4], uint32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Closes a group of this thread's cp.async (ptx.cuh: copy16_async).
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups of this thread are still under way.
template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
