// float8 (E4M3FN): a sign, 4 bits of exponent, 3 of fraction, subnormal numbers, no infinity; 0x7f and 0xff are NaN.
#pragma once

#include <cstdint>

#include "kv_attention/shared/layout.h"

namespace graphopt {

struct Float8 {
  uint8_t bits;
};

GRAPHOPT_INLINE uint32_t float8_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounds to the nearest, ties to even, and saturates, as ONNX's Cast does. Written so that compilers vectorize it.
GRAPHOPT_INLINE Float8 to_float8(float value) {
  const uint32_t bits = float8_bits(value), sign = bits >> 31 << 7, magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  // The last place of subnormal numbers is 2^-9, as that of floats from 2^14 on: this addition rounds.
  float positive;
  __builtin_memcpy(&positive, &magnitude, sizeof positive);
  const uint32_t subnormal = float8_bits(positive + 0x1p14f) - float8_bits(0x1p14f);
  uint32_t code = magnitude < 0x3c800000 ? subnormal : normal;
  code = magnitude > 0x43e00000 ? 0x7e : code;
  code = magnitude > 0x7f800000 ? 0x7f : code;
  return {static_cast<uint8_t>(code | sign)};
}

}  // namespace graphopt
