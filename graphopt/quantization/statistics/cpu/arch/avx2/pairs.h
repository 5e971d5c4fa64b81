#pragma once

#include "arch/avx2/target.h"

namespace graphopt {
namespace {

using Lanes = __m256i;
using Pairs = __m256i;

// Vectors of the left side, and lines of the right one, whose sums stay in registers.
constexpr size_t kLanesOf = 8, kRows = 4, kPlaces = 2;

// Loaded once: compilers would read memory again for each row, and there are two loads in a cycle.
GRAPHOPT_FORCE_INLINE Pairs load_pairs(const int16_t* from) {
  Pairs pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __asm__("" : "+x"(pairs));
  return pairs;
}

GRAPHOPT_FORCE_INLINE Pairs spread_pair(const int16_t* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// sum + the products of both numbers of each pair.
GRAPHOPT_FORCE_INLINE Lanes add_pairs(Lanes sum, Pairs a, Pairs b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

}  // namespace
}  // namespace graphopt
