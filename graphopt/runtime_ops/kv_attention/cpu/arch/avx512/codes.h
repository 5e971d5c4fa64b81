#pragma once

#include "kv_attention/cpu/factors.h"
#include "kv_attention/cpu/planes.h"

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

// Bytes moved to the right, or to the left by less than nothing. Bits of neighbours come along.
template <int Bits>
inline __attribute__((always_inline)) __m512i moved(__m512i bytes) {
  return Bits > 0 ? _mm512_srli_epi16(bytes, Bits > 0 ? Bits : 0) : _mm512_slli_epi16(bytes, Bits < 0 ? -Bits : 0);
}

// The codes of four `F` of each lane of a unit, as bytes.
template <unsigned Bits, size_t F>
inline __attribute__((always_inline)) __m512i codes_of(const __m512i (&unit)[Planes<Bits>::kLines]) {
  using Of = Planes<Bits>;
  if (Bits == 8) return unit[0];
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(Of::kLowerMask));
  const __m512i lower = _mm512_and_si512(moved<static_cast<int>(Of::shift(F))>(unit[Of::line(F)]), mask);
  if (!Of::kUpper) return lower;
  const __m512i upper = moved<Of::upper_shift(F)>(unit[Of::kLines - 1]);
  return _mm512_or_si512(lower, _mm512_and_si512(upper, _mm512_set1_epi8(static_cast<char>(Of::kUpperMask))));
}

// Sums of products of lines of codes with rows of factors, of high and of low bytes.
template <unsigned Bits, size_t Rows, size_t Lines>
class CodeSums {
  using Of = Planes<Bits>;

 public:
  // Codes of one unit of each line, `to_line` bytes apart.
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t to_line,
                                                 size_t unit) {
    __m512i line[Lines][Of::kLines];
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) {
#pragma GCC unroll 3
      for (size_t j = 0; j < Of::kLines; ++j) line[i][j] = _mm512_loadu_si512(codes + i * to_line + j * kLine);
    }
    each_four<Of::kFours>([&](auto f) __attribute__((always_inline)) {
      __m512i four[Lines];
#pragma GCC unroll 2
      for (size_t i = 0; i < Lines; ++i) four[i] = codes_of<Bits, decltype(f)::value>(line[i]);
      multiply(factors, four, Of::kCodes * unit + 4 * f);
    });
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
