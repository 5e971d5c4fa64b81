// bfloat16: rounded from floats. arch/<set>/loads.h loads it as floats.
#pragma once

#include "kv_attention/shared/layout.h"
#include "arch/vector.h"

namespace graphopt {

struct BFloat16 {
  uint16_t bits;
};

namespace {

// Rounds to the nearest, ties to even. Written so that compilers vectorize it.
inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest)};
}

inline void put_one(float x, BFloat16* to) { *to = to_bfloat16(x); }

}  // namespace
}  // namespace graphopt
