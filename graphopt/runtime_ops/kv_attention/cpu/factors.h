// Queries and weights as integers of 16 bits, for products with codes.
#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// The longest row of factors: the channels of a head.
constexpr size_t kMostFactors = 256;

#if defined(__AVX512VNNI__)
constexpr size_t kCodeRows = 4;  // each has two sums for a line, of high and of low bytes
// The largest factor, 256 * upper + lower; so sums of 256 products with codes of 8 bits stay below 2^31.
constexpr float kLargestFactor = 32639;

// Factors of codes, rounded to 16 bits for each row. Rows go side by side: each waits for its largest.
template <size_t Rows>
struct Factors {
  alignas(kLine) float exact[Rows][kMostFactors];
  alignas(kLine) int8_t upper[Rows][kMostFactors], lower[Rows][kMostFactors];
  float steps[Rows], offsets[Rows];

  // exact = of(row, i) times the steps, offsets = the sum of of(row, i) times the lows; take(i, &low, &step) reads
  // both.
  template <typename Of, typename Take>
  inline __attribute__((always_inline)) void round(size_t count, const Of& of, const Take& take) {
    Floats offset[Rows];
    __m512i most[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) offset[r] = all_lanes(0.f), most[r] = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i += kColumns) {
      Floats low, step;
      take(i, &low, &step);
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const Floats x = of(r, i), scaled = x * step;
        offset[r] = fused(x, low, offset[r]);
        store_line(exact[r] + i, scaled);
        // The bits of magnitudes are in their order, and those of NaN come last, so a NaN is never lost.
        const __m512i bits = _mm512_castps_si512(scaled.part[0]);
        most[r] = _mm512_max_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)), most[r]);
      }
    }
    float inverse[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const float largest = bits_of<float>(_mm512_reduce_max_epi32(most[r]));
      const bool none = largest < 1e-30f;
      inverse[r] = none ? 0 : kLargestFactor / largest;
      steps[r] = none ? 0 : largest / kLargestFactor;
      offsets[r] = sum_of(offset[r]);
    }
    // bytes 1 of lanes, then bytes 0
    alignas(32) static constexpr uint8_t kBytes[32] = {1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                       0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
    const __m512i bytes = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(kBytes)));
    const __m256i signs = _mm256_set_m128i(_mm_set1_epi8(-128), _mm_setzero_si128());
    for (size_t i = 0; i < count; i += kColumns) {
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const __m512i x = _mm512_cvtps_epi32((load_line<Floats>(exact[r] + i) * inverse[r]).part[0]);
        // x is 256 * upper + lower, both signed: of x + 128 they are byte 1, and byte 0 less 128
        const __m512i both = _mm512_permutexvar_epi8(bytes, _mm512_add_epi32(x, _mm512_set1_epi32(128)));
        const __m256i parts = _mm256_xor_si256(_mm512_castsi512_si256(both), signs);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(upper[r] + i), _mm256_castsi256_si128(parts));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lower[r] + i), _mm256_extracti128_si256(parts, 1));
      }
    }
  }
};
#endif

}  // namespace
}  // namespace graphopt
