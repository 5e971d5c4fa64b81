#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE Floats minimum(const Floats& a, const Floats& b) {
  return {{reinterpret_cast<Floats::Part>(_mm512_min_ps(a.part[0], b.part[0]))}};
}

GRAPHOPT_FORCE_INLINE Floats gather(const float* from, const Integers& indices) {
  return {{_mm512_i32gather_ps(reinterpret_cast<__m512i>(indices.part[0]), from, 4)}};
}

}  // namespace
}  // namespace graphopt
