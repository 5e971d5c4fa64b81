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
