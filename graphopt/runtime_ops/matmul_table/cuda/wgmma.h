// Products by a group of four warps on sm_90a, which multiply what they have in registers by what is in shared memory,
// while they do other work. Only for nvcc: where the target is another one, and in the interpreter, nothing calls this.
//
// A [64, 16] is in registers: warp w has rows 16 w to 16 w + 15 as in m16n8k16. B [16, 128] is 128 rows of 32 bytes of
// a part of 64 numbers of K: rows follow one another by 128 bytes, and 16 bytes number c of row r are at c ^ (r % 8)
// (the swizzle of 128 bytes). D [64, 128] as in m16n8k16 for each 8 columns: d[4 j + i].
#pragma once

#include "cuda/device.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GRAPHOPT_WGMMA 1
#else
#define GRAPHOPT_WGMMA 0
#endif

// The sums of a lane as operands of assembly.
#define GRAPHOPT_SUMS_8(d, i)                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GRAPHOPT_SUMS(d)                                                                                         \
  GRAPHOPT_SUMS_8(d, 0), GRAPHOPT_SUMS_8(d, 8), GRAPHOPT_SUMS_8(d, 16), GRAPHOPT_SUMS_8(d, 24),               \
      GRAPHOPT_SUMS_8(d, 32), GRAPHOPT_SUMS_8(d, 40), GRAPHOPT_SUMS_8(d, 48), GRAPHOPT_SUMS_8(d, 56)

namespace graphopt {

#if defined(__CUDACC__)
// Where B is: at a multiple of 1024 bytes, or some 32 bytes behind one.
GRAPHOPT_DEVICE uint64_t matrix_at(const void* shared) {
  const uint64_t address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
}

// Around products: what was written to registers, and by copies or stores to shared memory, is seen by them.
GRAPHOPT_DEVICE void begin_products() {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
GRAPHOPT_DEVICE void show_shared_to_products() {
#if GRAPHOPT_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
GRAPHOPT_DEVICE void commit_products() {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
GRAPHOPT_DEVICE void wait_products(float (&d)[64]) {
#if GRAPHOPT_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : GRAPHOPT_SUMS(d)
               :
               : "memory");
#else
  (void)d;
#endif
}

// A barrier in shared memory that counts arrivals; phases follow one another, and a wait names the parity of one.
GRAPHOPT_DEVICE void make_barrier(uint64_t* barrier, unsigned arrivals) {
#if GRAPHOPT_WGMMA
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
#endif
}
GRAPHOPT_DEVICE void arrive(uint64_t* barrier) {
#if GRAPHOPT_WGMMA
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
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

// D = A B, or D + A B where `adds`, of float16.
GRAPHOPT_DEVICE void multiply_64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool adds) {
#if GRAPHOPT_WGMMA
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, "
          "%24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, "
          "%40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, "
          "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}\n"
          : GRAPHOPT_SUMS(d)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
#else
  (void)d, (void)a, (void)b, (void)adds;
#endif
}
#endif

}  // namespace graphopt
