#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

constexpr bool kSumsBytes = true, kByPairs = true;
constexpr int kByteBias = 0;

template <bool Small>
GRAPHOPT_FORCE_INLINE Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(word));
  return by_parts<Integers>([&](size_t i) {
    return reinterpret_cast<Integers::Part>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum.part[i]), reinterpret_cast<__m256i>(bytes.part[i]), x));
  });
}

}  // namespace
}  // namespace graphopt
