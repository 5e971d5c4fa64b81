#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE Floats minimum(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}

GRAPHOPT_FORCE_INLINE Floats gather(const float* from, const Integers& indices) {
  return by_parts<Floats>([&](size_t i) {
    Floats::Part part;
    for (size_t lane = 0; lane < sizeof part / sizeof(float); ++lane) part[lane] = from[indices.part[i][lane]];
    return part;
  });
}

}  // namespace
}  // namespace graphopt
