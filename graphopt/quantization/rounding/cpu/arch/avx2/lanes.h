#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE Floats minimum(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return _mm256_min_ps(a.part[i], b.part[i]); });
}

GRAPHOPT_FORCE_INLINE Floats gather(const float* from, const Integers& indices) {
  return by_parts<Floats>(
      [&](size_t i) { return _mm256_i32gather_ps(from, reinterpret_cast<__m256i>(indices.part[i]), 4); });
}

}  // namespace
}  // namespace graphopt
