#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

inline Floats load_halves(const Half* from) {
  float numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) numbers[i] = number<float>(from[i]);
  return load_line<Floats>(numbers);
}

GRAPHOPT_FORCE_INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return by_parts<Floats>([&](size_t i) {
    Floats::Part part;
    for (size_t lane = 0; lane < kVectorBytes / 4; ++lane) {
      part[lane] = __builtin_fmaf(a.part[i][lane], b.part[i][lane], c.part[i][lane]);
    }
    return part;
  });
}

GRAPHOPT_FORCE_INLINE Floats dot_float(const Floats& sum, const Floats& line, uint32_t word) {
  return sum + line * bits_of<float>(word);
}

// sum + the products of the 2 bfloat16 of each lane of `pairs` and the 2 of `word`.
inline Floats dot_bfloat16(const Floats& sum, const Bytes& pairs, uint32_t word) {
  // a bfloat16 is the upper half of a float
  typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
  const float low = bits_of<float>(word << 16), high = bits_of<float>(word & 0xffff0000u);
  return by_parts<Floats>([&](size_t i) {
    const Words w = reinterpret_cast<Words>(pairs.part[i]);
    return sum.part[i] + (reinterpret_cast<Floats::Part>(w << 16) * low +
                          reinterpret_cast<Floats::Part>(w & 0xffff0000u) * high);
  });
}

template <typename T>
GRAPHOPT_FORCE_INLINE void settle(Line<T>&) {}

}  // namespace
}  // namespace graphopt
