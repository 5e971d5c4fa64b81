// Rounding to float16 in a direction: the scales of pages of codes, see spec/layout.py.
#pragma once

#include <cstdint>

#include "abi/half.h"
#include "kv_attention/shared/inline.h"

namespace graphopt {

// The float16 at or below |x|, or, `outward`, at or above it, with the sign of x; 65504 is the largest, and NaN stays.
GRAPHOPT_INLINE Half half_beside(float x, bool outward) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 31 << 15, magnitude = bits & 0x7fffffff;
  const bool normal = magnitude >= 0x38800000;  // 2^-14
  float size;
  __builtin_memcpy(&size, &magnitude, sizeof size);
  const float steps = normal ? 0.0f : size * 0x1p24f;  // of the least float16, below 2^10
  const uint32_t whole = static_cast<uint32_t>(static_cast<int32_t>(steps));
  uint32_t half = normal ? (magnitude >> 13) - (112u << 10) : whole;
  const bool exact = normal ? (magnitude & 0x1fff) == 0 : static_cast<float>(static_cast<int32_t>(whole)) == steps;
  half += outward && !exact;  // what follows the largest number of an exponent is the first of the next
  half = half > 0x7bff ? 0x7bff : half;
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return Half{static_cast<uint16_t>(half | sign)};
}

// The largest float16 at or below x, at least -65504, and the least at or above x, at most 65504.
GRAPHOPT_INLINE Half half_below(float x) { return half_beside(x, x < 0); }
GRAPHOPT_INLINE Half half_above(float x) { return half_beside(x, x > 0); }

}  // namespace graphopt
