// Products by a group of four warps on sm_90a, which multiply what they have in registers by what is in shared memory,
// while they do other work. Where nvcc's target is another one, nothing calls this.
//
// A [64, 16] is in registers: warp w has rows 16 w to 16 w + 15 as in m16n8k16. B [16, 128] is 128 rows of 32 bytes of
// a part of 64 numbers of K: rows follow one another by 128 bytes, and 16 bytes number c of row r are at c ^ (r % 8)
// (the swizzle of 128 bytes). D [64, 128] as in m16n8k16 for each 8 columns: d[4 j + i].
//
// B may be transposed instead: 16 rows of 128 bytes, which are 64 columns, with the same swizzle; the other 64 columns
// are kTransposedHalf bytes further.
#pragma once

#include "cuda/device.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GRAPHOPT_WGMMA 1
#else
#define GRAPHOPT_WGMMA 0
#endif

// The sums of a lane as operands of assembly, and their numbers there.
#define GRAPHOPT_SUMS_8(kind, d, i)                                                                             \
  kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), \
      kind(d[i + 7])
#define GRAPHOPT_SUMS(kind, d)                                                                                  \
  GRAPHOPT_SUMS_8(kind, d, 0), GRAPHOPT_SUMS_8(kind, d, 8), GRAPHOPT_SUMS_8(kind, d, 16),                      \
      GRAPHOPT_SUMS_8(kind, d, 24), GRAPHOPT_SUMS_8(kind, d, 32), GRAPHOPT_SUMS_8(kind, d, 40),                \
      GRAPHOPT_SUMS_8(kind, d, 48), GRAPHOPT_SUMS_8(kind, d, 56)
#define GRAPHOPT_NUMBERS_64                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, "  \
  "%8, %9, %10, %11, %12, %13, %14, %15, "  \
  "%16, %17, %18, %19, %20, %21, %22, %23, "  \
  "%24, %25, %26, %27, %28, %29, %30, %31, "  \
  "%32, %33, %34, %35, %36, %37, %38, %39, "  \
  "%40, %41, %42, %43, %44, %45, %46, %47, "  \
  "%48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63"

namespace graphopt {

// Where B is: at a multiple of 1024 bytes, or some 32 bytes behind one. 16 bytes further is 1 more.
GRAPHOPT_DEVICE uint64_t matrix_at(const void* shared) {
#if defined(__CUDACC__)
  const uint64_t address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
#else
  return reinterpret_cast<uintptr_t>(shared) >> 4;
#endif
}

// Where a transposed B is: at a multiple of 1024 bytes; the next 16 rows are 2048 bytes further, which is 128 more.
constexpr unsigned kTransposedHalf = 16384;
GRAPHOPT_DEVICE uint64_t transposed_at(const void* shared) {
#if defined(__CUDACC__)
  const uint64_t address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{kTransposedHalf >> 4} << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
#else
  return reinterpret_cast<uintptr_t>(shared) >> 4;
#endif
}

// Around products: what was written to registers, and by copies or stores to shared memory, is seen by them.
GRAPHOPT_DEVICE void begin_products() {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
  host::begin_products();
#endif
}
GRAPHOPT_DEVICE void show_shared_to_products() {
#if GRAPHOPT_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif !defined(__CUDACC__)
  host::show_shared();
#endif
}
GRAPHOPT_DEVICE void commit_products() {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
  host::commit_products();
#endif
}
// Waits until at most the `Newest` groups of products that were closed last are under way.
template <int Newest>
GRAPHOPT_DEVICE void wait_products() {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Newest) : "memory");
#elif !defined(__CUDACC__)
  host::wait_products(Newest);
#endif
}
// All products, whose sums are read behind this.
template <unsigned Sets>
GRAPHOPT_DEVICE void wait_products(float (&d)[Sets][64]) {
  wait_products<0>();
#if GRAPHOPT_WGMMA
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < Sets; ++i) asm volatile("" : GRAPHOPT_SUMS("+f", d[i])::"memory");
#else
  (void)d;
#endif
}
template <int Newest>
GRAPHOPT_DEVICE void wait_products(float (&d)[64]) {
  wait_products<Newest>();
#if GRAPHOPT_WGMMA
  asm volatile("" : GRAPHOPT_SUMS("+f", d)::"memory");
#else
  (void)d;
#endif
}
GRAPHOPT_DEVICE void wait_products(int32_t (&d)[64]) {
  wait_products<0>();
#if GRAPHOPT_WGMMA
  asm volatile("" : GRAPHOPT_SUMS("+r", d)::"memory");
#else
  (void)d;
#endif
}

// A barrier in shared memory that counts arrivals; phases follow one another, and a wait names the parity of one.
GRAPHOPT_DEVICE void make_barrier(uint64_t* barrier, unsigned arrivals) {
#if GRAPHOPT_WGMMA
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
#elif !defined(__CUDACC__)
  host::make_barrier(barrier, arrivals);
#endif
}
GRAPHOPT_DEVICE void arrive(uint64_t* barrier) {
#if GRAPHOPT_WGMMA
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
#elif !defined(__CUDACC__)
  host::arrive(barrier);
#endif
}
GRAPHOPT_DEVICE void wait_barrier(uint64_t* barrier, unsigned parity) {
#if GRAPHOPT_WGMMA
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n.reg .pred done;\n"
      "again%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end%=;\nbra again%=;\nend%=:\n}\n" ::"r"(at),
      "r"(parity)
      : "memory");
#elif !defined(__CUDACC__)
  host::wait_barrier(barrier, parity);
#endif
}
// Registers of a thread from here on, for groups of four warps whose threads have 168 each when they start.
template <int Count>
GRAPHOPT_DEVICE void take_registers() {
#if GRAPHOPT_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count>
GRAPHOPT_DEVICE void give_registers() {
#if GRAPHOPT_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

// D += A B, of float16; or of signed bytes, where A is [64, 32] as in m16n8k32 and rows of B are 32 bytes of 128.
GRAPHOPT_DEVICE void multiply_64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#if GRAPHOPT_WGMMA
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
          GRAPHOPT_NUMBERS_64
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;\n"
          : GRAPHOPT_SUMS("+f", d)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif !defined(__CUDACC__)
  host::multiply_64x128(d, a, b);
#endif
}
GRAPHOPT_DEVICE void multiply_64x128(int32_t (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#if GRAPHOPT_WGMMA
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
          GRAPHOPT_NUMBERS_64
      "}, {%64, %65, %66, %67}, %68, 1;\n"
          : GRAPHOPT_SUMS("+r", d)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif !defined(__CUDACC__)
  host::multiply_64x128(d, a, b);
#endif
}

// D += A B, or D = A B, of float16, where B is transposed.
template <bool Adds>
GRAPHOPT_DEVICE void multiply_64x128_transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#if GRAPHOPT_WGMMA
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
          GRAPHOPT_NUMBERS_64
      "}, {%64, %65, %66, %67}, %68, %69, 1, 1, 1;\n"
          : GRAPHOPT_SUMS("+f", d)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Adds ? 1 : 0));
#elif !defined(__CUDACC__)
  host::multiply_64x128_transposed(d, a, b, Adds);
#endif
}

}  // namespace graphopt
