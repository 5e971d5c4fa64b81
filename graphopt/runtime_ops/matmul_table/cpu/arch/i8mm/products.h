#pragma once

#include "matmul_table/cpu/products.h"

namespace graphopt {
namespace {

// Two rows of x times two columns at a time, 8 numbers of each: those of two lines.
struct Int8Matrices {
  static constexpr size_t kLines = 4;
  static constexpr bool kFromZero = false;
  using Sum = Integers;

  template <size_t Width, size_t kSides>
  static GRAPHOPT_FORCE_INLINE void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                             size_t units) {
    if constexpr (Width == 1) return multiply_lines<Int8<false>, 1, kSides>(sums, line, word, units);
    constexpr size_t kTwos = Width / 2;
    int32x4_t products[Width][kSides][kParts] = {};  // of rows 2 i and 2 i + 1: even parts of columns, then odd ones
    for (size_t pair_count = units * kLines / 2; pair_count; --pair_count, line += 4 * kLine, word += 2 * Width) {
      int8x16_t x[kTwos];
#pragma GCC unroll 3
      for (size_t i = 0; i < kTwos; ++i) {
        const uint32x2_t first = vld1_u32(word + 2 * i), second = vld1_u32(word + Width + 2 * i);
        x[i] = vreinterpretq_s8_u32(vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second)));
      }
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
        const uint8_t* const at = line + side * kLine;
#pragma GCC unroll 4
        for (size_t part = 0; part < kParts; ++part) {
          const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(at + part * kVectorBytes));
          const uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(at + 2 * kLine + part * kVectorBytes));
          const int8x16_t even = vreinterpretq_s8_u32(vzip1q_u32(a, b)), odd = vreinterpretq_s8_u32(vzip2q_u32(a, b));
#pragma GCC unroll 3
          for (size_t i = 0; i < kTwos; ++i) {
            products[2 * i][side][part] = vmmlaq_s32(products[2 * i][side][part], x[i], even);
            products[2 * i + 1][side][part] = vmmlaq_s32(products[2 * i + 1][side][part], x[i], odd);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (size_t i = 0; i < kTwos; ++i) {
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
#pragma GCC unroll 4
        for (size_t part = 0; part < kParts; ++part) {
          const int32x4_t even = products[2 * i][side][part], odd = products[2 * i + 1][side][part];
          const int32x4_t first = vcombine_s32(vget_low_s32(even), vget_low_s32(odd));
          const int32x4_t second = vcombine_s32(vget_high_s32(even), vget_high_s32(odd));
          sums[2 * i][side].part[part] += reinterpret_cast<Integers::Part>(first);
          sums[2 * i + 1][side].part[part] += reinterpret_cast<Integers::Part>(second);
        }
      }
    }
  }
};

// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights& weights, const Rounded&, const WithProduct& with_product) {
  if (weights.table.wide) return with_product(static_cast<Int8Matrices*>(nullptr), std::true_type());
  with_product(static_cast<Int8Matrices*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
