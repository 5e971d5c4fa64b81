#pragma once

#include "arch/scalar/target.h"

namespace graphopt {
namespace {

struct Pairs {
  int16_t first, second;
};
using Lanes = int32_t;

// Vectors of the left side, and lines of the right one, whose sums stay in registers.
constexpr size_t kLanesOf = 1, kRows = 2, kPlaces = 4;

GRAPHOPT_FORCE_INLINE Pairs load_pairs(const int16_t* from) { return {from[0], from[1]}; }

GRAPHOPT_FORCE_INLINE Pairs spread_pair(const int16_t* from) { return {from[0], from[1]}; }

// sum + the products of both numbers of each pair.
GRAPHOPT_FORCE_INLINE Lanes add_pairs(Lanes sum, Pairs a, Pairs b) {
  return sum + a.first * b.first + a.second * b.second;
}

}  // namespace
}  // namespace graphopt
