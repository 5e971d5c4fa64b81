// Loads, stores and copies of 8 and 16 bytes; device.h includes this. Addresses are multiples of what is moved.
#pragma once

#include "cuda/device.h"

namespace graphopt {

#if !defined(__CUDACC__)
namespace host {
template <typename Word>
inline const Word& aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Word)) fail("%zu bytes at no multiple of that", sizeof(Word));
  return *static_cast<const Word*>(from);
}
}  // namespace host
#endif

GRAPHOPT_DEVICE Word2 load8(const void* from) {
#if defined(__CUDACC__)
  return *static_cast<const Word2*>(from);
#else
  return host::aligned<Word2>(from);
#endif
}
GRAPHOPT_DEVICE Word4 load16(const void* from) {
#if defined(__CUDACC__)
  return *static_cast<const Word4*>(from);
#else
  return host::aligned<Word4>(from);
#endif
}

// For global memory that is constant while the kernel runs and read once, such as weights: bypasses L1 and is evicted
// first from L2.
GRAPHOPT_DEVICE Word4 load16_once(const void* from) {
#if defined(__CUDACC__)
  uint32_t a, b, c, d;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
      : "l"(__cvta_generic_to_global(from)));
  return {{a, b, c, d}};
#else
  host::check_global(from, 16);
  return host::aligned<Word4>(from);
#endif
}

// Asks for 128 bytes of global memory to be brought to L2.
GRAPHOPT_DEVICE void prefetch(const void* from) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
#else
  host::check_global(from, 4);
#endif
}

GRAPHOPT_DEVICE void store8(void* to, const Word2& word) {
#if defined(__CUDACC__)
  *static_cast<Word2*>(to) = word;
#else
  const_cast<Word2&>(host::aligned<Word2>(to)) = word;
#endif
}
GRAPHOPT_DEVICE void store16(void* to, const Word4& word) {
#if defined(__CUDACC__)
  *static_cast<Word4*>(to) = word;
#else
  const_cast<Word4&>(host::aligned<Word4>(to)) = word;
#endif
}

// Starts a copy of 16 bytes to shared memory: zeros where not `valid`, and then `global` may be any address. The bytes
// are there for this thread once a wait covers the group that the next commit_copies() closes, and for others once they
// have synchronized with it behind that.
GRAPHOPT_DEVICE void copy_async16(void* shared, const void* global, bool valid) {
#if defined(__CUDACC__)
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  host::copy_async16(shared, global, valid);
#endif
}
GRAPHOPT_DEVICE void commit_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host::commit_copies();
#endif
}
// Waits until at most the `Newest` groups of this thread that were closed last are under way.
template <int Newest>
GRAPHOPT_DEVICE void wait_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
#else
  host::wait_copies(Newest);
#endif
}

}  // namespace graphopt
