#pragma once

#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/float8.h"

namespace graphopt {
namespace {

inline Floats load_numbers(const BFloat16* from) {
  const auto part = [&](size_t i) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  };
  return {{part(0), part(1)}};
}

inline Floats load_numbers(const Float8* from) {
  // Shifted to where a half has exponent and fraction, they are 2^8 too small; that also takes in subnormal numbers.
  const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
  const __m256i numbers = _mm256_or_si256(halves, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7)));
  const __m256 scale = _mm256_set1_ps(256);
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(numbers)) * scale,
           _mm256_cvtph_ps(_mm256_extracti128_si256(numbers, 1)) * scale}};
}

inline Integers load_bytes(const void* from) {
  return by_parts<Integers>([&](size_t i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + 8 * i));
    return reinterpret_cast<Integers::Part>(_mm256_cvtepu8_epi32(bytes));
  });
}

}  // namespace
}  // namespace graphopt
