#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

constexpr bool kSumsBytes = true, kByPairs = false;
constexpr int kByteBias = 0;

template <bool Small>
GRAPHOPT_FORCE_INLINE Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
  return {{reinterpret_cast<Integers::Part>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum.part[0]), reinterpret_cast<__m512i>(bytes.part[0]),
                          _mm512_set1_epi32(static_cast<int>(word))))}};
}

}  // namespace
}  // namespace graphopt
