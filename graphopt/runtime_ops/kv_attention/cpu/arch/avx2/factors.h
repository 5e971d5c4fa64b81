#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

constexpr size_t kCodeRows = 4;  // of factors that go together

// Rounded factors of one row as the instructions take them, 16 at a time.
struct FactorRow {
  // of each four the first and third, then the second and fourth, as bytes are taken apart
  alignas(kLine) int16_t pairs[kMostFactors];

  void put(size_t i, const Floats& numbers) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    for (size_t part = 0; part < kParts; ++part, i += 8) {
      const __m256i x = _mm256_shuffle_epi8(_mm256_cvtps_epi32(numbers.part[part]), order);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(pairs + i), _mm256_castsi256_si128(x));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(pairs + i + 4), _mm256_extracti128_si256(x, 1));
    }
  }
};

inline int32_t largest_of(const Integers& a) {
  const __m256i eight = _mm256_max_epi32(reinterpret_cast<__m256i>(a.part[0]), reinterpret_cast<__m256i>(a.part[1]));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

}  // namespace
}  // namespace graphopt
