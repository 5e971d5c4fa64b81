// float8 (E4M3FN): the floats that its codes mean. arch/<set>/loads.h loads them.
#pragma once

#include "kv_attention/shared/float8.h"
#include "arch/vector.h"

namespace graphopt {
namespace {

inline void put_one(float x, Float8* to) { *to = to_float8(x); }

// The bits of the float that a code without its sign means.
constexpr uint32_t float8_magnitude(uint32_t code) {
  if (code == 0x7f) return 0x7fc00000;
  if (code >= 8) return ((code >> 3) + 120) << 23 | (code & 7) << 20;
  if (code == 0) return 0;
  uint32_t shift = 1;
  while (code << shift < 8) ++shift;
  return (121 - shift) << 23 | (code << shift & 7) << 20;
}

// Bytes 3 and 2 of these bits; the others are 0.
struct Float8Bytes {
  uint8_t upper[128] = {}, lower[128] = {};

  constexpr Float8Bytes() {
    for (uint32_t code = 0; code < 128; ++code) {
      upper[code] = static_cast<uint8_t>(float8_magnitude(code) >> 24);
      lower[code] = static_cast<uint8_t>(float8_magnitude(code) >> 16);
    }
  }
};
alignas(kLine) constexpr Float8Bytes kFloat8;

}  // namespace
}  // namespace graphopt
