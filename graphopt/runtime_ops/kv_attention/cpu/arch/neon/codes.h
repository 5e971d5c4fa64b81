#pragma once

#include <type_traits>

#include "kv_attention/cpu/factors.h"

namespace graphopt {
namespace {

constexpr size_t kCodeLines = 1;

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors: those of two codes of each number
// stay apart until the end.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    uint16x8_t pairs[kParts];
#pragma GCC unroll 4
    for (size_t i = 0; i < kParts; ++i) pairs[i] = vreinterpretq_u16_u8(vld1q_u8(codes + 16 * i));
    // codes of 4 bits: the lower ones of each byte are the first four of a unit, the upper ones the others
    const auto part = [&](auto shift) __attribute__((always_inline)) {
      constexpr int kShift = decltype(shift)::value;
      const size_t first = (Narrow ? 8 * unit + (kShift & 4) : 4 * unit) + (kShift & 8) / 4;
      int16x8_t numbers[kParts];
#pragma GCC unroll 4
      for (size_t i = 0; i < kParts; ++i) {
        const uint16x8_t moved = pairs[i] >> kShift;
        numbers[i] = vreinterpretq_s16_u16(vandq_u16(moved, vdupq_n_u16(Narrow ? 15 : 255)));
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        uint32_t two;
        __builtin_memcpy(&two, factors.rounded[r].pairs + first, sizeof two);
        const int16x8_t factor = vreinterpretq_s16_u32(vdupq_n_u32(two));
#pragma GCC unroll 4
        for (size_t i = 0; i < kParts; ++i) {
          sums_[r][2 * i] = vmlal_s16(sums_[r][2 * i], vget_low_s16(numbers[i]), vget_low_s16(factor));
          sums_[r][2 * i + 1] = vmlal_high_s16(sums_[r][2 * i + 1], numbers[i], factor);
        }
      }
    };
    part(std::integral_constant<int, 0>()), part(std::integral_constant<int, 8>());
    if (Narrow) part(std::integral_constant<int, 4>()), part(std::integral_constant<int, 12>());
  }

  Floats of(size_t r, size_t) const {
    return by_parts<Floats>([&](size_t i) {
      return reinterpret_cast<Floats::Part>(vcvtq_f32_s32(vpaddq_s32(sums_[r][2 * i], sums_[r][2 * i + 1])));
    });
  }

 private:
  int32x4_t sums_[Rows][2 * kParts] = {};
};

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/multiply_codes.h"
