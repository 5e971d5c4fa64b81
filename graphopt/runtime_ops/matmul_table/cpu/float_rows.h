// What decoders of floats give: the values of a line of codes, 4 rows of 16 columns.
//
// A decoder's values are multiples of `unit()`, which is a power of two: value of the table = decoded * unit.
#pragma once

#include "matmul_table/cpu/epilogue.h"
#include "matmul_table/cpu/to_byte.h"

namespace graphopt {
namespace {

// An operand that sets have which multiply bfloat16.
template <int Bits>
class AsBfloat16s;

struct Rows {
  Floats row[4];
};

// Integers that fit a byte, signed or not: the byte of each row goes to the end of its lane.
template <bool Signed>
GRAPHOPT_FORCE_INLINE Rows rows_of_bytes(const Bytes& bytes) {
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Naturals __attribute__((vector_size(kVectorBytes)));
  using Lanes = std::conditional_t<Signed, Ints, Naturals>;
  Rows rows;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows.row[i] = by_parts<Floats>([&](size_t part) {
      const auto lanes = reinterpret_cast<Lanes>(reinterpret_cast<Naturals>(bytes.part[part]) << (24 - 8 * i)) >> 24;
      return __builtin_convertvector(reinterpret_cast<Ints>(lanes), Floats::Part);
    });
  }
  return rows;
}

// Takes zero points off each value, or adds minimums: a sum of floats would lose what is taken off afterwards.
GRAPHOPT_FORCE_INLINE Floats shift_values(const Floats& decoded, float unit, const ColumnScales& of) {
  if (of.minimums) return decoded * unit * of.scale + of.zero_point;
  return decoded * unit - of.zero_point;
}

// What is left to be done to a sum of such values.
inline ColumnScales after_shift(ColumnScales of) {
  if (of.minimums) of.scale = all_lanes(1.0f);
  of.with_zero_point = of.minimums = false;
  return of;
}

}  // namespace
}  // namespace graphopt
