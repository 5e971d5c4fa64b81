#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

constexpr size_t kCodeRows = 4;  // of factors that go together

// Rounded factors of one row as the instructions take them, 16 at a time.
struct FactorRow {
  // 256 * upper + lower, both signed
  alignas(kLine) int8_t upper[kMostFactors], lower[kMostFactors];

  void put(size_t i, const Floats& numbers) {
    // bytes 1 of lanes, then bytes 0
    alignas(32) static constexpr uint8_t kBytes[32] = {1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                       0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
    const __m512i bytes = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(kBytes)));
    const __m256i signs = _mm256_set_m128i(_mm_set1_epi8(-128), _mm_setzero_si128());
    const __m512i x = _mm512_cvtps_epi32(numbers.part[0]);
    // of x + 128 they are byte 1, and byte 0 less 128
    const __m512i both = _mm512_permutexvar_epi8(bytes, _mm512_add_epi32(x, _mm512_set1_epi32(128)));
    const __m256i parts = _mm256_xor_si256(_mm512_castsi512_si256(both), signs);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + i), _mm256_castsi256_si128(parts));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower + i), _mm256_extracti128_si256(parts, 1));
  }
};

inline int32_t largest_of(const Integers& a) {
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(a.part[0]));
}

}  // namespace
}  // namespace graphopt
