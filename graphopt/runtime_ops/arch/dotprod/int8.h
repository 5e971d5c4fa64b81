#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

constexpr bool kSumsBytes = false, kByPairs = false;
constexpr int kByteBias = 128;

template <bool Small>
GRAPHOPT_FORCE_INLINE Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
  const int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(word));
  return by_parts<Integers>([&](size_t i) {
    const int8x16_t w = reinterpret_cast<int8x16_t>(bytes.part[i]);
    const int32x4_t before = reinterpret_cast<int32x4_t>(sum.part[i]);
    return reinterpret_cast<Integers::Part>(vdotq_s32(before, w, x));
  });
}

}  // namespace
}  // namespace graphopt
