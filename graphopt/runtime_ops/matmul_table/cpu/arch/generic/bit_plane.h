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

// Every second bit of a plane of one bit: bit 2 j of each byte is that of line J, the others are left over.
GRAPHOPT_FORCE_INLINE Bytes spread_single_bits(const uint8_t* plane) {
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  return by_parts<Bytes>([&](size_t i) {
    Pairs part;
    __builtin_memcpy(&part, plane + i * kVectorBytes % 32, sizeof part);
    return reinterpret_cast<Bytes::Part>(part >> static_cast<uint16_t>(i * kVectorBytes / 32));
  });
}

}  // namespace
}  // namespace graphopt
