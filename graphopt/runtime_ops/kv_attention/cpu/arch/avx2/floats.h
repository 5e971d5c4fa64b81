#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr size_t kMostTogether = 4, kSumLines = 4;
constexpr size_t kFloatRowsInOrder = 0;

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return multiply_add(a, b, c); }

template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  const __m256 half = reinterpret_cast<__m256>(join(a.part[0], a.part[1]));
  typedef float Four __attribute__((vector_size(16)));
  const auto four = [](__m128 x) { return reinterpret_cast<Four>(x); };
  const Four quarter = join(four(_mm256_castps256_ps128(half)), four(_mm256_extractf128_ps(half, 1)));
  const __m128 two = reinterpret_cast<__m128>(join(quarter, four(_mm_movehl_ps(quarter, quarter))));
  return join(four(two), four(_mm_movehdup_ps(two)))[0];
}

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/arch/generic/floats.h"
