#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "arch/avx2/target.h"

namespace graphopt {
namespace {

template <typename T>
struct Wide {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Narrow = Wide<T>;

// As many totals of paley.h at a time as there are registers for, beside a pair and its sums.
constexpr size_t kPaleyTotals = 9;

// Whether memory can be written past the caches, and whether a vector that goes there is a whole line.
constexpr bool kStreams = true, kStreamsLines = false;

// partner + v, and partner - v in lanes that are an upper one of a pair.
template <typename Integer, bool... Upper, typename V>
inline V add_or_subtract(V v, V partner) {
  // partner + (-v): the sign bit is flipped to get there
  typedef Integer Mask __attribute__((vector_size(sizeof(V))));
  constexpr Integer sign = std::numeric_limits<Integer>::min();  // that bit alone
  const Mask flip = {(Upper ? sign : Integer(0))...};
  return partner + reinterpret_cast<V>(reinterpret_cast<Mask>(v) ^ flip);
}

// Ones that the compiler cannot constant-fold.
template <typename V>
inline V ones() {
  V one = V{} + 1;
  __asm__("" : "+x"(one));
  return one;
}

// total + x and total - x where `one` is ones, on the units for multiplications.
template <typename V>
inline V plus_times(V total, V x, V one) {
  if constexpr (sizeof(x[0]) == 4) return _mm256_fmadd_ps(x, one, total);
  else return _mm256_fmadd_pd(x, one, total);
}

template <typename V>
inline V minus_times(V total, V x, V one) {
  if constexpr (sizeof(x[0]) == 4) return _mm256_fnmadd_ps(x, one, total);
  else return _mm256_fnmadd_pd(x, one, total);
}

inline void fence() { _mm_sfence(); }

inline void stream_copy_of_line(void* to, const void* from) {
  for (size_t half = 0; half < 2; ++half) {
    const __m256i numbers = _mm256_loadu_si256(static_cast<const __m256i*>(from) + half);
    _mm256_stream_si256(static_cast<__m256i*>(to) + half, numbers);
  }
}

}  // namespace
}  // namespace graphopt
