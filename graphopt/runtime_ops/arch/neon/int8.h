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
    // two products fit 16 bits: 2 * 128 * 127
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return reinterpret_cast<Integers::Part>(vpadalq_s16(before, vpaddq_s16(low, high)));
  });
}

}  // namespace
}  // namespace graphopt
