#pragma once

#include "matmul_table/cpu/arch/avx2/forms.h"
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
// 32 with four, of 16 with eight, those of two units.
template <size_t Run>
struct Int8Runs {
  static constexpr size_t kLines = 4, kRunUnits = Run / kLines;
  static constexpr bool kFromZero = false;
  using Sum = Integers;

  template <size_t Width, size_t kSides>
  static GRAPHOPT_FORCE_INLINE void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                             size_t units) {
    const auto add_run = [&](auto lines) __attribute__((always_inline)) {
      constexpr size_t kRun = decltype(lines)::value;
      multiply_run<Width, kSides, kRun>(line, word, [&](size_t row, const Sum (&of_run)[kSides])
                                                        __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (size_t side = 0; side < kSides; ++side) {
          sums[row][side] = by_parts<Sum>([&](size_t i) { return sums[row][side].part[i] + of_run[side].part[i]; });
        }
      });
      line += 2 * kRun * kLine, word += kRun * Width;
    };
    if constexpr (Run > kLines) {
      for (; units >= kRunUnits; units -= kRunUnits) add_run(std::integral_constant<size_t, Run>());
      if (units) add_run(std::integral_constant<size_t, kLines>());
    } else {
      for (size_t run = units * (kLines / Run); run; --run) add_run(std::integral_constant<size_t, Run>());
    }
  }

  // Calls with_row(row, sums of each side) for the products of a run.
  template <size_t Width, size_t kSides, size_t Lines, typename WithRow>
  static GRAPHOPT_FORCE_INLINE void multiply_run(const uint8_t* line, const uint32_t* word, const WithRow& with_row) {
    __m256i runs[Width][kSides][2];  // not lines: the compiler would copy them
#pragma GCC unroll 8
    for (size_t j = 0; j < Lines; ++j, line += 2 * kLine, word += Width) {
      __m256i values[kSides][2];
#pragma GCC unroll 4
      for (size_t i = 0; i < 2 * kSides; ++i) {
        values[i / 2][i % 2] = _mm256_load_si256(reinterpret_cast<const __m256i*>(line + i / 2 * kLine) + i % 2);
      }
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
        const __m256i x = _mm256_set1_epi32(static_cast<int>(word[row]));
#pragma GCC unroll 4
        for (size_t i = 0; i < 2 * kSides; ++i) {
          __m256i& run = runs[row][i / 2][i % 2];
          __m256i products = _mm256_maddubs_epi16(values[i / 2][i % 2], x);
          if (j) products = _mm256_add_epi16(run, products);
          asm("" : "+x"(products));  // see settle
          run = products;
        }
      }
    }
    const int16_t* const ones = ones_near();
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
      Sum of_run[kSides];
#pragma GCC unroll 4
      for (size_t i = 0; i < 2 * kSides; ++i) {
        const __m256i one = _mm256_load_si256(reinterpret_cast<const __m256i*>(ones));
        const __m256i pairs = _mm256_madd_epi16(runs[row][i / 2][i % 2], one);
        of_run[i / 2].part[i % 2] = reinterpret_cast<Sum::Part>(pairs);
      }
      with_row(row, of_run);
    }
  }
};

// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights& weights, const Rounded& rounded, const WithProduct& with_product) {
  if (rounded.form == Words::kFloats) return with_product(static_cast<Float*>(nullptr), std::false_type());
  if (weights.table.is_trellis && !weights.table.fits_pairs()) {
    return with_product(static_cast<SignedBytes*>(nullptr), std::false_type());
  }
  if (rounded.form == Words::kPairs) return with_product(static_cast<Int16*>(nullptr), std::false_type());
  if (weights.table.most <= 16) return with_product(static_cast<Int8Runs<8>*>(nullptr), std::false_type());
  if (weights.table.most <= 32) return with_product(static_cast<Int8Runs<4>*>(nullptr), std::false_type());
  if (weights.table.most <= 64) return with_product(static_cast<Int8Runs<2>*>(nullptr), std::false_type());
  with_product(static_cast<Int8<true>*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
