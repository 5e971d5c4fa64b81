#pragma once

#include "kv_attention/cpu/factors.h"

namespace graphopt {
namespace {

constexpr size_t kCodeLines = 2;  // that share each load of factors

// sum + the products of the 4 codes of each lane with 4 factors. Left to itself the compiler copies sums around.
inline __attribute__((always_inline)) void multiply_four(__m512i& sum, __m512i codes, __m512i factors) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(factors));
}

inline __attribute__((always_inline)) __m512i four_factors(const int8_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm512_set1_epi32(word);
}

// Sums of products of lines of codes with rows of factors, of high and of low bytes.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  // Codes of one unit of each line, `to_line` bytes apart.
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t to_line,
                                                 size_t unit) {
    __m512i line[Lines];
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) line[i] = _mm512_loadu_si512(codes + i * to_line);
    if (!Narrow) return multiply(factors, line, 4 * unit);
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i half[Lines];
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) half[i] = _mm512_and_si512(line[i], mask);
    multiply(factors, half, 8 * unit);
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) half[i] = _mm512_and_si512(_mm512_srli_epi16(line[i], 4), mask);
    multiply(factors, half, 8 * unit + 4);
  }

  Floats of(size_t r, size_t i) const {
    return {{_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper_[r][i], 8), lower_[r][i]))}};
  }

 private:
  inline __attribute__((always_inline)) void multiply(const Factors<Rows>& factors, const __m512i (&four)[Lines],
                                                      size_t first) {
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const FactorRow& row = factors.rounded[r];
      const __m512i high = four_factors(row.upper + first), low = four_factors(row.lower + first);
#pragma GCC unroll 2
      for (size_t i = 0; i < Lines; ++i) {
        multiply_four(upper_[r][i], four[i], high);
        multiply_four(lower_[r][i], four[i], low);
      }
    }
  }

  __m512i upper_[Rows][Lines] = {}, lower_[Rows][Lines] = {};
};

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/multiply_codes.h"
