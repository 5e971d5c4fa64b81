#pragma once

#include "matmul_table/cpu/products.h"

namespace graphopt {
namespace {

// Signed bytes, none of them -128: their signs go to x, so that two products fit 16 bits.
struct SignedBytes : ByLines<SignedBytes> {
  static constexpr size_t kLines = 4;
  static constexpr bool kFromZero = true;
  using Sum = Integers;
  static GRAPHOPT_FORCE_INLINE Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(word)), magnitudes = _mm256_abs_epi8(x);
    return by_parts<Sum>([&](size_t i) __attribute__((always_inline)) {
      const __m256i signed_bytes = _mm256_sign_epi8(reinterpret_cast<__m256i>(line.part[i]), x);
      const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_bytes);
      return sum.part[i] + reinterpret_cast<Sum::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    });
  }
};

struct Int16 : ByLines<Int16> {
  static constexpr size_t kLines = 8;
  static constexpr bool kFromZero = false;
  using Sum = Integers;
  static GRAPHOPT_FORCE_INLINE Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot_pairs(sum, line, word);
  }
};

// Bytes so small that the products of `Run` lines fit 16 bits, and are summed up there: of 64 at most with two lines, of
// 32 with four.
template <size_t Run>
struct Int8Runs {
  static constexpr size_t kLines = 4;
  static constexpr bool kFromZero = false;
  using Sum = Integers;

  template <size_t Width, size_t kSides>
  static GRAPHOPT_FORCE_INLINE void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                             size_t units) {
    for (size_t left = units * (kLines / Run); left; --left) {
      Line<int16_t> runs[Width][kSides];
#pragma GCC unroll 4
      for (size_t j = 0; j < Run; ++j, line += 2 * kLine, word += Width) {
#pragma GCC unroll 12
        for (size_t row = 0; row < Width; ++row) {
          const __m256i x = _mm256_set1_epi32(static_cast<int>(word[row]));
#pragma GCC unroll 2
          for (size_t side = 0; side < kSides; ++side) {
            const auto products = by_parts<Line<int16_t>>([&](size_t i) __attribute__((always_inline)) {
              const auto* const at = reinterpret_cast<const __m256i*>(line + side * kLine) + i;
              return reinterpret_cast<Line<int16_t>::Part>(_mm256_maddubs_epi16(_mm256_load_si256(at), x));
            });
            Line<int16_t>& run = runs[row][side];
            run = j ? by_parts<Line<int16_t>>([&](size_t i) { return run.part[i] + products.part[i]; }) : products;
            settle(run);
          }
        }
      }
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
        for (size_t side = 0; side < kSides; ++side) {
          sums[row][side] = by_parts<Integers>([&](size_t i) __attribute__((always_inline)) {
            const __m256i run = reinterpret_cast<__m256i>(runs[row][side].part[i]);
            const __m256i pairs = _mm256_madd_epi16(run, _mm256_set1_epi16(1));
            return sums[row][side].part[i] + reinterpret_cast<Integers::Part>(pairs);
          });
        }
      }
    }
  }
};

// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights& weights, const Rounded& rounded, const WithProduct& with_product) {
  if (rounded.form == Words::kFloats) return with_product(static_cast<Float*>(nullptr), std::false_type());
  if (weights.table.is_trellis && weights.table.most > 128) {
    return with_product(static_cast<SignedBytes*>(nullptr), std::false_type());
  }
  if (rounded.form == Words::kPairs) return with_product(static_cast<Int16*>(nullptr), std::false_type());
  if (weights.table.most <= 32) return with_product(static_cast<Int8Runs<4>*>(nullptr), std::false_type());
  if (weights.table.most <= 64) return with_product(static_cast<Int8Runs<2>*>(nullptr), std::false_type());
  with_product(static_cast<Int8<true>*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
