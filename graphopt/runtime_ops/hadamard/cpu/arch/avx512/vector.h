#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/avx512/target.h"

namespace graphopt {
namespace {

template <typename T>
struct Wide {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Narrow = Wide<T>;

// As many totals of paley.h at a time as there are registers for, beside a pair and its sums.
constexpr size_t kPaleyTotals = 18;

// Whether memory can be written past the caches, and whether a vector that goes there is a whole line.
constexpr bool kStreams = true, kStreamsLines = true;

// partner + v, and partner - v in lanes that are an upper one of a pair.
template <typename Integer, bool... Upper, typename V>
inline V add_or_subtract(V v, V partner) {
  // v times 1 or -1 is exact, so this rounds once, as an addition does
  typedef decltype(v[0] + v[0]) Number;
  const V signs = {(Upper ? Number(-1) : Number(1))...};
  if constexpr (sizeof(Number) == 4) return _mm512_fmadd_ps(v, signs, partner);
  else return _mm512_fmadd_pd(v, signs, partner);
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
  if constexpr (sizeof(x[0]) == 4) return _mm512_fmadd_ps(x, one, total);
  else return _mm512_fmadd_pd(x, one, total);
}

template <typename V>
inline V minus_times(V total, V x, V one) {
  if constexpr (sizeof(x[0]) == 4) return _mm512_fnmadd_ps(x, one, total);
  else return _mm512_fnmadd_pd(x, one, total);
}

inline void fence() { _mm_sfence(); }

// Writes a line past the caches; fence() must follow the last one.
template <typename V>
inline void stream_line(void* to, V v) {
  _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret_cast<__m512i>(v));
}

inline void stream_copy_of_line(void* to, const void* from) {
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

// The last `ends` numbers of one vector and as many of the first ones of another as make a vector.
template <typename V>
inline V end_and_begin(V first, V second, size_t ends) {
  constexpr int L = sizeof(V) / sizeof(first[0]);
  if constexpr (L == 16) {
    const __m512i from_0 = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_add_epi32(from_0, _mm512_set1_epi32(L - static_cast<int>(ends)));
    return _mm512_permutex2var_ps(first, from, second);
  } else {
    const __m512i from_0 = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i from = _mm512_add_epi64(from_0, _mm512_set1_epi64(L - static_cast<int>(ends)));
    return _mm512_permutex2var_pd(first, from, second);
  }
}

}  // namespace
}  // namespace graphopt
