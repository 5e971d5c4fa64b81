#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE Floats::Part minimum(const Floats::Part& a, const Floats::Part& b) {
  return a < b ? a : b;
}

// sum + a b, where neither sum nor product is rounded.
GRAPHOPT_FORCE_INLINE Floats::Part add_product(const Floats::Part& sum, const Floats::Part& a, float b) {
  return sum + a * b;
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
