#pragma once

#include "arch/neon/target.h"

namespace graphopt {
namespace {

using Lanes = int32x4_t;
using Pairs = int16x8_t;

// Vectors of the left side, and lines of the right one, whose sums stay in registers.
constexpr size_t kLanesOf = 4, kRows = 4, kPlaces = 4;

GRAPHOPT_FORCE_INLINE Pairs load_pairs(const int16_t* from) { return vld1q_s16(from); }

GRAPHOPT_FORCE_INLINE Pairs spread_pair(const int16_t* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return vreinterpretq_s16_s32(vdupq_n_s32(pair));
}

// sum + the products of both numbers of each pair.
GRAPHOPT_FORCE_INLINE Lanes add_pairs(Lanes sum, Pairs a, Pairs b) {
  return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}

}  // namespace
}  // namespace graphopt
