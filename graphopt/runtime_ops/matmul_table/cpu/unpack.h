// The loader: packed planes of bits become codes, one to a byte.
#pragma once

#include <type_traits>

#include "arch/vector.h"
#include "matmul_table/shared/weights.h"
#include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, bit_plane.h)

namespace graphopt {
namespace {

constexpr size_t kUnitLines = 4;  // 256 codes: 16 rows of 16 columns

// Shifts 16 bits at a time: bits move from one byte into the next, where they are masked off or never looked at.
template <int By>
GRAPHOPT_FORCE_INLINE Bytes shift_right(const Bytes& bytes) {
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  return by_parts<Bytes>([&](size_t i) {
    const Pairs pairs = reinterpret_cast<Pairs>(bytes.part[i]);
    return reinterpret_cast<Bytes::Part>(By >= 0 ? pairs >> (By >= 0 ? By : 0) : pairs << (By < 0 ? -By : 0));
  });
}

GRAPHOPT_FORCE_INLINE Bytes select(const Bytes& a, const Bytes& b, uint8_t from_a) {
  return by_parts<Bytes>([&](size_t i) {
    const Bytes::Part mask = Bytes::Part{} + from_a;
    return (a.part[i] & mask) | (b.part[i] & ~mask);
  });
}

GRAPHOPT_FORCE_INLINE Bytes masked(const Bytes& a, uint8_t mask) {
  return by_parts<Bytes>([&](size_t i) { return a.part[i] & (Bytes::Part{} + mask); });
}

GRAPHOPT_FORCE_INLINE Bytes either(const Bytes& a, const Bytes& b) {
  return by_parts<Bytes>([&](size_t i) { return a.part[i] | b.part[i]; });
}

// The codes of a unit, line j holding those of 4 rows; with Exact the bits above the code are 0.
template <int Bits, bool Exact, size_t J>
GRAPHOPT_FORCE_INLINE Bytes codes_of_line(const uint8_t* unit) {
  constexpr int in4 = Bits & 4, in2 = Bits & 2, in1 = Bits & 1;
  if constexpr (Bits == 8) return load_line<Bytes>(unit + J * kLine);
  Bytes codes = {};
  if constexpr (in4) codes = shift_right<J % 2 ? 4 : 0>(load_line<Bytes>(unit + J / 2 * kLine));
  if constexpr (in2) {
    constexpr int shift = 2 * static_cast<int>(J) - in4;
    const Bytes twos = shift_right<shift>(load_line<Bytes>(unit + 32 * in4));
    if constexpr (in4 && (in1 || Exact)) {
      codes = either(masked(codes, 0x0f), masked(twos, 0x30));
    } else if constexpr (in4) {
      codes = select(codes, twos, 0x0f);
    } else {
      codes = twos;
    }
  }
  if constexpr ((in1 || Exact) && !(in4 && in2)) codes = masked(codes, (1 << (Bits & 6)) - 1);
  if constexpr (in1) codes = with_single_bit<Bits - 1, J>(codes, unit + 32 * (Bits - 1));
  return codes;
}

// Calls with_line(j) for each line of a unit, j known to the compiler.
template <typename WithLine>
GRAPHOPT_FORCE_INLINE void for_each_line(const WithLine& with_line) {
  with_line(std::integral_constant<size_t, 0>());
  with_line(std::integral_constant<size_t, 1>());
  with_line(std::integral_constant<size_t, 2>());
  with_line(std::integral_constant<size_t, 3>());
}

}  // namespace
}  // namespace graphopt
