#pragma once

#include <type_traits>

#include "kv_attention/cpu/factors.h"
#include "kv_attention/cpu/planes.h"

namespace graphopt {
namespace {

constexpr size_t kCodeLines = 1;

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors: those of two codes of each number
// stay apart until the end.
template <unsigned Bits, size_t Rows, size_t Lines>
class CodeSums {
  using Of = Planes<Bits>;

 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    each_four<Of::kFours>([&](auto f) __attribute__((always_inline)) {
      constexpr size_t kFour = decltype(f)::value;
      add_part<kFour, 0>(factors, codes, unit), add_part<kFour, 8>(factors, codes, unit);
    });
  }

  Floats of(size_t r, size_t) const {
    return by_parts<Floats>([&](size_t i) {
      return reinterpret_cast<Floats::Part>(vcvtq_f32_s32(vpaddq_s32(sums_[r][2 * i], sums_[r][2 * i + 1])));
    });
  }

 private:
  // Of four `F` the codes in the lower or the upper byte of each 16 bits.
  template <size_t F, int Byte>
  inline __attribute__((always_inline)) void add_part(const Factors<Rows>& factors, const uint8_t* codes, size_t unit) {
    constexpr int kShift = Byte + static_cast<int>(Of::shift(F)), kUpperShift = Byte + Of::upper_shift(F);
    const size_t first = Of::kCodes * unit + 4 * F + Byte / 4;
    int16x8_t numbers[kParts];
#pragma GCC unroll 4
    for (size_t i = 0; i < kParts; ++i) {
      const uint16x8_t lower = vreinterpretq_u16_u8(vld1q_u8(codes + Of::line(F) * kLine + 16 * i)) >> kShift;
      uint16x8_t number = vandq_u16(lower, vdupq_n_u16(Bits == 8 ? 255 : Of::kLowerMask));
      if (Of::kUpper) {
        const uint16x8_t upper = vreinterpretq_u16_u8(vld1q_u8(codes + Of::kLowerLines * kLine + 16 * i));
        const uint16x8_t moved = kUpperShift >= 0 ? upper >> (kUpperShift >= 0 ? kUpperShift : 0)
                                                  : upper << (kUpperShift < 0 ? -kUpperShift : 0);
        number = vorrq_u16(number, vandq_u16(moved, vdupq_n_u16(Of::kUpperMask)));
      }
      numbers[i] = vreinterpretq_s16_u16(number);
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
  }

  int32x4_t sums_[Rows][2 * kParts] = {};
};

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/multiply_codes.h"
