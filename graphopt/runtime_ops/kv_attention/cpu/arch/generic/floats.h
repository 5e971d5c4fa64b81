// Of a set whose own floats.h has `joined`, the lanes of a line joined by halves: 8 with 8, 4 with 4, 2 with 2, 1 with 1.
#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

inline Floats larger(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline Floats smaller(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}

inline float sum_of(const Floats& a) {
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}

inline Floats sums_of(const Floats (&of)[kColumns]) {
  float sums[kColumns];
  for (size_t i = 0; i < kColumns; ++i) sums[i] = sum_of(of[i]);
  return load_line<Floats>(sums);
}

inline float largest_lane(const Floats& a) {
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}

inline uint32_t lanes_at_least(const Integers& ranks, int32_t least) {
  int32_t lanes[kColumns];
  store_line(lanes, ranks);
  uint32_t bits = 0;
  for (size_t i = 0; i < kColumns; ++i) bits |= static_cast<uint32_t>(lanes[i] >= least) << i;
  return bits;
}

}  // namespace
}  // namespace graphopt
