#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

// Sets bit `At` of each byte of line J where the plane of one bit has a 1; the bit was 0.
template <int At, size_t J>
GRAPHOPT_FORCE_INLINE Bytes with_single_bit(const Bytes& line, const uint8_t* plane) {
  return by_parts<Bytes>([&](size_t i) {
    const size_t position = J * kLine + i * kVectorBytes, h = position / 32;
    Bytes::Part part;
    __builtin_memcpy(&part, plane + position % 32, sizeof part);
    return line.part[i] | (part >> static_cast<uint8_t>(h) & 1) << At;
  });
}

}  // namespace
}  // namespace graphopt
