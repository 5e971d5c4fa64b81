#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

inline Floats load_halves(const Half* from) {
  return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}};
}

GRAPHOPT_FORCE_INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return {{_mm512_fmadd_ps(a.part[0], b.part[0], c.part[0])}};
}

GRAPHOPT_FORCE_INLINE Floats dot_float(const Floats& sum, const Floats& line, uint32_t word) {
  return {{_mm512_fmadd_ps(line.part[0], _mm512_set1_ps(bits_of<float>(word)), sum.part[0])}};
}

// sum + the products of the 2 bfloat16 of each lane of `pairs` and the 2 of `word`.
inline Floats dot_bfloat16(const Floats& sum, const Bytes& pairs, uint32_t word) {
  return {{_mm512_dpbf16_ps(sum.part[0], reinterpret_cast<__m512bh>(pairs.part[0]),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(word))))}};
}

template <typename T>
GRAPHOPT_FORCE_INLINE void settle(Line<T>&) {}

}  // namespace
}  // namespace graphopt
