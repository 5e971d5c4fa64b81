#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

inline Floats load_halves(const Half* from) {
  const auto part = [&](size_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
  };
  return {{part(0), part(1)}};
}

GRAPHOPT_FORCE_INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return by_parts<Floats>([&](size_t i) { return _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]); });
}

GRAPHOPT_FORCE_INLINE Floats dot_float(const Floats& sum, const Floats& line, uint32_t word) {
  const float x = bits_of<float>(word);
  return by_parts<Floats>([&](size_t i) { return _mm256_fmadd_ps(line.part[i], _mm256_set1_ps(x), sum.part[i]); });
}

template <typename T>
GRAPHOPT_FORCE_INLINE void settle(Line<T>& sum) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) asm("" : "+x"(sum.part[i]));
}

}  // namespace
}  // namespace graphopt
