// Scaling the sum of a segment, the same in every product, so that a row gives the same bits whatever rows stand beside
// it.
#pragma once

#include "matmul_table/cpu/kernels.h"
#include "matmul_table/cpu/segments.h"
#include "arch/vector.h"

namespace graphopt {
namespace {

// Scales and zero points of the columns of a tile in one segment.
struct ColumnScales {
  Floats scale, zero_point;  // the latter in steps of the table; a minimum where `minimums` says so
  bool with_zero_point, minimums;
};

// The numbers of a group in the columns of a tile.
GRAPHOPT_FORCE_INLINE Floats leveled_numbers(const Weights& weights, const Leveled& levels, size_t tile, size_t group) {
  const uint8_t* const of_tile = levels.bytes + tile * levels.tile_bytes;
  const uint8_t* const unit = of_tile + group / 16 * 32 * static_cast<size_t>(levels.bits);
  // a lane of a line has the codes of four rows of its column
  const size_t line = group % 16 / 4;
  const int shift = static_cast<int>(group % 4 * 8);
  Integers codes;
  if (levels.bits == 8) {
    const Integers words = load_line<Integers>(unit + kLine * line);
    codes = by_parts<Integers>([&](size_t i) { return words.part[i] >> shift & 255; });
  } else {
    const Integers words = load_line<Integers>(unit + kLine * (line / 2));
    const int shift_of_half = shift + static_cast<int>(line % 2 * 4);
    codes = by_parts<Integers>([&](size_t i) { return words.part[i] >> shift_of_half & 15; });
  }
  if (levels.bits == 6) {
    const Integers words = load_line<Integers>(unit + 2 * kLine);
    const int shift_of_quarter = shift + static_cast<int>(line * 2);
    codes = by_parts<Integers>([&](size_t i) { return codes.part[i] | (words.part[i] >> shift_of_quarter & 3) << 4; });
  }
  const auto* const steps = reinterpret_cast<const Half*>(of_tile + levels.first_step);
  return (to_floats(codes) + all_lanes(weights.low)) * load_halves(steps + kColumns * (group >> weights.span_bits));
}

// Scales and zero points in two levels. Not inlined: kernels whose numbers are stored as they are would be made of calls.
__attribute__((noinline)) inline void read_levels(const Weights& weights, size_t tile, size_t group, float inverse_step,
                                                  ColumnScales* of) {
  of->scale = leveled_numbers(weights, weights.levels, tile, group);
  of->with_zero_point = weights.zero_levels.bytes;
  of->minimums = of->with_zero_point && weights.minimums;
  of->zero_point = of->with_zero_point ? leveled_numbers(weights, weights.zero_levels, tile, group) * inverse_step : Floats{};
}

// groups: of a tile. What a call writes is an object of its own, and no object is cleared as a whole: of a pointer that
// leaves, GCC clears the memory by an instruction that takes as long as the products of a short group.
GRAPHOPT_FORCE_INLINE ColumnScales column_scales(const Weights& weights, size_t tile, size_t groups, size_t group,
                                                 float inverse_step) {
  if (weights.levels.bytes) {
    ColumnScales of;
    read_levels(weights, tile, group, inverse_step, &of);
    return of;
  }
  const size_t at = (tile * groups + group) * kColumns;
  const Floats scale = weights.scales ? load_line<Floats>(weights.scales + at) : load_halves(weights.half_scales + at);
  const bool with_zero_point = weights.zero_points || weights.half_zero_points;
  Floats zero_point = {};
  if (weights.zero_points) zero_point = load_line<Floats>(weights.zero_points + at) * inverse_step;
  if (weights.half_zero_points) zero_point = load_halves(weights.half_zero_points + at) * inverse_step;
  return {scale, zero_point, with_zero_point, with_zero_point && weights.minimums};
}

// The same as a call, for loops that rarely need them and should stay small.
__attribute__((noinline)) inline void read_column_scales(const Weights& weights, size_t tile, size_t group,
                                                         ColumnScales* of) {
  *of = column_scales(weights, tile, weights.groups(), group, 1);
}

// total + what a segment gives: (sum - zero point * the sum of x) * scale of x * scale of the column, or
// (sum * scale of the column + minimum * the sum of x) * scale of x.
GRAPHOPT_FORCE_INLINE Floats add_scaled(const Floats& total, Floats sum, const ColumnScales& of, float scale,
                                        float sum_of_x) {
  if (of.minimums) {
    return multiply_add(sum * scale, of.scale, multiply_add(of.zero_point * sum_of_x, all_lanes(scale), total));
  }
  if (of.with_zero_point) sum = sum - of.zero_point * sum_of_x;
  return multiply_add(sum * scale, of.scale, total);
}

// The same for operands that are not integers and have no scale of their own.
GRAPHOPT_FORCE_INLINE Floats add_scaled(const Floats& total, Floats sum, const ColumnScales& of, float sum_of_x) {
  if (of.minimums) return multiply_add(sum, of.scale, total + of.zero_point * sum_of_x);
  if (of.with_zero_point) sum = sum - of.zero_point * sum_of_x;
  return multiply_add(sum, of.scale, total);
}

// Columns of a tile that are there.
inline size_t columns_of(const Weights& weights, size_t tile) {
  const size_t remaining_columns = weights.columns - tile * kColumns;
  return remaining_columns < kColumns ? remaining_columns : kColumns;
}

// Writes one row of x times a tile.
inline void store_row(const Weights& weights, Floats line, size_t tile, float* row_of_y) {
  const size_t count = columns_of(weights, tile), column = tile * kColumns;
  if (count == kColumns) {
    if (weights.bias) line = line + load_line<Floats>(weights.bias + column);
    return store_line(row_of_y + column, line);
  }
  float numbers[kColumns];
  store_line(numbers, line);
  for (size_t i = 0; i < count; ++i) {
    row_of_y[column + i] = weights.bias ? numbers[i] + weights.bias[column + i] : numbers[i];
  }
}

}  // namespace
}  // namespace graphopt
