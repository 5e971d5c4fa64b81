// Products of small matrices by a warp, and loads of their fragments. All lanes take part in each; who holds what is in
// the PTX ISA: with g = lane / 4 and t = lane % 4,
//
//   m16n8k16: a[i] is the pair A[g + 8 (i % 2)][2 t + 8 (i / 2), and the next], b[i] the pair B[2 t + 8 i, and next][g]
//   m16n8k32: a[i] are four bytes A[g + 8 (i % 2)][4 t + 16 (i / 2), and on], b[i] those of B[4 t + 16 i, and on][g]
//   both:     d[i] is D[g + 8 (i / 2)][2 t + i % 2]
//
// where A is [16, k], B [k, 8] and D [16, 8]. A float sum is not what IEEE addition gives: a GPU cuts what it adds to
// about the precision of the largest one, eight products at a time or more. The host does the same as sm_80.
#pragma once

#include "cuda/device.h"

namespace graphopt {

// d += a b, of float16 or bfloat16.
GRAPHOPT_DEVICE void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::multiply_f16(d, a, b);
#endif
}
GRAPHOPT_DEVICE void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::multiply_bf16(d, a, b);
#endif
}

// d += a b, of signed bytes; it wraps.
GRAPHOPT_DEVICE void multiply_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::multiply_s8(d, a, b);
#endif
}

// The same where bytes of a have no sign.
GRAPHOPT_DEVICE void multiply_u8s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::multiply_u8s8(d, a, b);
#endif
}

// Count (1, 2 or 4) matrices [8, 8] of 16-bit numbers from shared memory: lanes 8 i to 8 i + 7 say where the rows of
// matrix i are, 16 bytes each at multiples of 16. r[i] is the pair [g][2 t, 2 t + 1] of matrix i, or [2 t, 2 t + 1][g]
// of it where transposed. Each lane must give an address that can be read, used or not.
template <int Count>
GRAPHOPT_DEVICE void load_matrices(uint32_t (&r)[Count], const void* row) {
  static_assert(Count == 1 || Count == 2 || Count == 4, "1, 2 or 4 matrices");
#if defined(__CUDACC__)
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
  } else if constexpr (Count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  }
#else
  host::load_matrices(r, Count, row, false);
#endif
}
// The other way, of four that are transposed: what [2 t, 2 t + 1][g] of matrix i is goes to r[i] of load_matrices_transposed.
GRAPHOPT_DEVICE void store_matrices_transposed(void* row, const uint32_t (&r)[4]) {
#if !defined(__CUDACC__)
  host::store_matrices_transposed(row, r);
#elif __CUDA_ARCH__ >= 900
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
  (void)row, (void)r;
#endif
}
template <int Count>
GRAPHOPT_DEVICE void load_matrices_transposed(uint32_t (&r)[Count], const void* row) {
  static_assert(Count == 1 || Count == 2 || Count == 4, "1, 2 or 4 matrices");
#if defined(__CUDACC__)
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
  } else if constexpr (Count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  }
#else
  host::load_matrices(r, Count, row, true);
#endif
}

}  // namespace graphopt
