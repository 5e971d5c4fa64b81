#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

constexpr bool kSumsBytes = false, kByPairs = true;
constexpr int kByteBias = 0;

template <bool Small>
GRAPHOPT_FORCE_INLINE Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
  const __m256i signed_bytes = _mm256_set1_epi32(static_cast<int>(word));
  if constexpr (Small) {
    return by_parts<Integers>([&](size_t i) {
      const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(bytes.part[i]), signed_bytes);
      return sum.part[i] + reinterpret_cast<Integers::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    });
  }
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8);
  const __m256i odd = _mm256_srai_epi16(signed_bytes, 8);
  return by_parts<Integers>([&](size_t i) {
    const __m256i u = reinterpret_cast<__m256i>(bytes.part[i]);
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), even),
                                              _mm256_madd_epi16(_mm256_srli_epi16(u, 8), odd));
    return sum.part[i] + reinterpret_cast<Integers::Part>(products);
  });
}

GRAPHOPT_FORCE_INLINE Integers dot_pairs(const Integers& sum, const Bytes& pairs, uint32_t word) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(word));
  return by_parts<Integers>([&](size_t i) {
    const __m256i numbers = reinterpret_cast<__m256i>(pairs.part[i]);
    return sum.part[i] + reinterpret_cast<Integers::Part>(_mm256_madd_epi16(numbers, x));
  });
}

}  // namespace
}  // namespace graphopt
