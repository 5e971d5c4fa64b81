#pragma once

#include "arch/avx512/target.h"

namespace graphopt {
namespace {

using Lanes = __m512i;
using Pairs = __m512i;

// Vectors of the left side, and lines of the right one, whose sums stay in registers.
constexpr size_t kLanesOf = 16, kRows = 4, kPlaces = 4;

GRAPHOPT_FORCE_INLINE Pairs load_pairs(const int16_t* from) { return _mm512_loadu_si512(from); }

GRAPHOPT_FORCE_INLINE Pairs spread_pair(const int16_t* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// sum + the products of both numbers of each pair.
GRAPHOPT_FORCE_INLINE Lanes add_pairs(Lanes sum, Pairs a, Pairs b) { return _mm512_dpwssd_epi32(sum, a, b); }

}  // namespace
}  // namespace graphopt
