#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

inline Floats load_halves(const Half* from) {
  return by_parts<Floats>([&](size_t i) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * i);
    return reinterpret_cast<Floats::Part>(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
  });
}

GRAPHOPT_FORCE_INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return by_parts<Floats>([&](size_t i) {
    return reinterpret_cast<Floats::Part>(vfmaq_f32(reinterpret_cast<float32x4_t>(c.part[i]),
                                                    reinterpret_cast<float32x4_t>(a.part[i]),
                                                    reinterpret_cast<float32x4_t>(b.part[i])));
  });
}

GRAPHOPT_FORCE_INLINE Floats dot_float(const Floats& sum, const Floats& line, uint32_t word) {
  return multiply_add(line, all_lanes(bits_of<float>(word)), sum);
}

template <typename T>
GRAPHOPT_FORCE_INLINE void settle(Line<T>& sum) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) asm("" : "+w"(sum.part[i]));
}

}  // namespace
}  // namespace graphopt
