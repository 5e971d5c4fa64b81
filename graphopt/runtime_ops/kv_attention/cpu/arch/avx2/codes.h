#pragma once

#include "kv_attention/cpu/factors.h"

namespace graphopt {
namespace {

constexpr size_t kCodeLines = 1;

inline __attribute__((always_inline)) __m256i two_factors(const int16_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm256_set1_epi32(word);
}

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    const __m256i* const line = reinterpret_cast<const __m256i*>(codes);
    const __m256i pairs[2] = {_mm256_loadu_si256(line), _mm256_loadu_si256(line + 1)};
    const auto part = [&](int shift) __attribute__((always_inline)) {
      const __m256i mask = _mm256_set1_epi16(Narrow ? 15 : 255);
      __m256i numbers[2];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) numbers[i] = _mm256_and_si256(_mm256_srli_epi16(pairs[i], shift), mask);
      // first and third of four codes come from the lower bytes
      const size_t first = (Narrow ? 8 * unit + (shift & 4) : 4 * unit) + (shift & 8) / 4;
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const __m256i factor = two_factors(factors.rounded[r].pairs + first);
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; ++i) {
          sums_[r][i] = _mm256_add_epi32(sums_[r][i], _mm256_madd_epi16(numbers[i], factor));
          asm("" : "+x"(sums_[r][i]));  // now: the compiler likes to put additions off
        }
      }
    };
    part(0), part(8);
    if (Narrow) part(4), part(12);
  }

  Floats of(size_t r, size_t) const {
    return by_parts<Floats>([&](size_t i) { return _mm256_cvtepi32_ps(sums_[r][i]); });
  }

 private:
  __m256i sums_[Rows][2] = {};
};

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/multiply_codes.h"
