// Vectors of the set of instructions that is compiled, and what differs between sets: see arch/<set>/vector.h.
//
// Every operation here is exact or rounds each number by itself, in the same order for every width: so all widths give
// the same bits. No function of the standard library is called: the linker could keep the copy that was compiled for
// wide vectors for a machine that has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "arch/arch.h"
#include GRAPHOPT_ARCH_HEADER(hadamard/cpu/arch, vector.h)

namespace graphopt {
namespace {

template <typename V, typename T>
constexpr size_t lanes = sizeof(V) / sizeof(T);

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <typename V, typename T>
inline void store(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// Whether Wide is a vector of several numbers.
template <typename T>
constexpr bool kHasVectors = sizeof(typename Wide<T>::type) > sizeof(T);

template <size_t Distance, typename V, typename Integer, size_t... I>
inline V butterfly_inside(V v, Integer, std::index_sequence<I...>) {
#if defined(__clang__)
  const V partner = __builtin_shufflevector(v, v, (I ^ Distance)...);
#else
  typedef Integer Mask __attribute__((vector_size(sizeof(V))));
  const V partner = __builtin_shuffle(v, Mask{static_cast<Integer>(I ^ Distance)...});
#endif
  return add_or_subtract<Integer, bool(I & Distance)...>(v, partner);
}

// Sums and differences of the lanes that are Distance apart, which is a power of two.
template <size_t Distance, typename T>
inline typename Wide<T>::type butterfly_inside(typename Wide<T>::type v) {
  using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  return butterfly_inside<Distance>(v, Integer(), std::make_index_sequence<lanes<typename Wide<T>::type, T>>());
}

// A copy that bypasses the caches, for data that is not read soon.
inline void stream(void* to, const void* from, size_t bytes) {
  char* t = static_cast<char*>(to);
  const char* f = static_cast<const char*>(from);
  if (kStreams) {
    // Only whole lines go past the caches.
    size_t head = -reinterpret_cast<uintptr_t>(t) % 64;
    if (head > bytes) head = bytes;
    __builtin_memcpy(t, f, head);
    for (t += head, f += head, bytes -= head; bytes >= 64; t += 64, f += 64, bytes -= 64) stream_copy_of_line(t, f);
  }
  fence();
  __builtin_memcpy(t, f, bytes);
}

}  // namespace
}  // namespace graphopt
