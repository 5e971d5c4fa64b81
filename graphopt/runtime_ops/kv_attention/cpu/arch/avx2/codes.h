#pragma once

#include "kv_attention/cpu/factors.h"
#include "kv_attention/cpu/planes.h"

namespace graphopt {
namespace {

constexpr size_t kCodeLines = 1;

inline __attribute__((always_inline)) __m256i two_factors(const int16_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm256_set1_epi32(word);
}

// Bits of each 16, moved to the right, or to the left by less than nothing.
inline __attribute__((always_inline)) __m256i part(__m256i pairs, int right, unsigned mask) {
  const __m256i moved = right >= 0 ? _mm256_srli_epi16(pairs, right) : _mm256_slli_epi16(pairs, -right);
  return _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<short>(mask)));
}

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors.
template <unsigned Bits, size_t Rows, size_t Lines>
class CodeSums {
  using Of = Planes<Bits>;

 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    const __m256i* const line = reinterpret_cast<const __m256i*>(codes);
    each_four<Of::kFours>([&](auto f) __attribute__((always_inline)) {
      // first and third of four codes come from the lower bytes
      for (int byte = 0; byte < 16; byte += 8) {
        __m256i numbers[2];
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; ++i) {
          numbers[i] = part(_mm256_loadu_si256(line + 2 * Of::line(f) + i), byte + static_cast<int>(Of::shift(f)),
                            Bits == 8 ? 255 : Of::kLowerMask);
          if (Of::kUpper) {
            const __m256i upper = _mm256_loadu_si256(line + 2 * Of::kLowerLines + i);
            numbers[i] = _mm256_or_si256(numbers[i], part(upper, byte + Of::upper_shift(f), Of::kUpperMask));
          }
        }
        const size_t first = Of::kCodes * unit + 4 * f + static_cast<size_t>(byte) / 4;
#pragma GCC unroll 8
        for (size_t r = 0; r < Rows; ++r) {
          const __m256i factor = two_factors(factors.rounded[r].pairs + first);
#pragma GCC unroll 2
          for (size_t i = 0; i < 2; ++i) {
            sums_[r][i] = _mm256_add_epi32(sums_[r][i], _mm256_madd_epi16(numbers[i], factor));
            asm("" : "+x"(sums_[r][i]));  // now: the compiler likes to put additions off
          }
        }
      }
    });
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
