#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE Floats::Part minimum(const Floats::Part& a, const Floats::Part& b) {
  return reinterpret_cast<Floats::Part>(_mm512_min_ps(a, b));
}

// sum + a b, where neither sum nor product is rounded.
GRAPHOPT_FORCE_INLINE Floats::Part add_product(const Floats::Part& sum, const Floats::Part& a, float b) {
  return reinterpret_cast<Floats::Part>(_mm512_fmadd_ps(a, _mm512_set1_ps(b), sum));
}

GRAPHOPT_FORCE_INLINE Floats gather(const float* from, const Integers& indices) {
  return {{_mm512_i32gather_ps(reinterpret_cast<__m512i>(indices.part[0]), from, 4)}};
}

}  // namespace
}  // namespace graphopt
