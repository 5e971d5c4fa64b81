// GEMM: many rows. Panels of rows pass by blocks of looked up values.
#pragma once

#include "matmul_table/cpu/block.h"
#include "matmul_table/cpu/epilogue.h"
#include GRAPHOPT_ARCH_HEADER(matmul_table/cpu/arch, kernels.h)

namespace graphopt {
namespace {

// What is done to the sums of a segment: floats are multiplied by `unit`, then by the scales of one or two tiles.
struct SegmentScales {
  ColumnScales of[2];
  size_t sides;
  float unit;
};

// Rows of x that go by a block of weights: their totals and the block fit the second level of the caches.
constexpr size_t kRowsOfBlock = 504;

// Whether a kind of product has no offset of bytes to take off its sums.
template <typename Kind>
constexpr bool starts_from_zero() {
  if constexpr (std::is_same_v<typename Kind::Sum, Integers>) return Kind::kFromZero;
  return true;
}

// One panel of rows and one segment; `totals`: [row][2], `at`: of its first row among those of the segment.
template <typename Kind, bool Wide, size_t Width>
void multiply_panel(const Rounded& rounded, size_t at, const uint8_t* lines, const uint32_t* words, size_t units,
                    const SegmentScales& scales, Floats* totals) {
  constexpr bool kIntegers = std::is_same_v<typename Kind::Sum, Integers>;
  constexpr size_t kSides = Wide ? 2 : sides_at_once(Width);
  for (size_t first = 0; first < scales.sides; first += kSides) {
    typename Kind::Sum sums[Width][kSides] = {};
    if constexpr (!starts_from_zero<Kind>()) {
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
        for (size_t side = 0; side < kSides; ++side) {
          sums[row][side] = all_lanes(rounded.starts[Wide ? side : 0][at + row]);
        }
      }
    }
    if constexpr (Wide && sides_at_once(Width) == 1) {  // registers hold the sums of one plane
      for (size_t plane = 0; plane < 2; ++plane) {
        typename Kind::Sum of_plane[Width][1];
        for (size_t row = 0; row < Width; ++row) of_plane[row][0] = sums[row][plane];
        Kind::template multiply<Width>(of_plane, lines + plane * kLine, words, units);
        for (size_t row = 0; row < Width; ++row) sums[row][plane] = of_plane[row][0];
      }
    } else {
      Kind::template multiply<Width>(sums, lines + first * kLine, words, units);
    }
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
      Floats* const total = totals + 2 * row + first;
      const float sum_of_x = rounded.sums[at + row];
      if constexpr (Wide) {
        const Floats sum = to_floats(sums[row][1]) * 256.0f + to_floats(sums[row][0]);
        total[0] = add_scaled(total[0], sum, scales.of[0], rounded.scales[at + row], sum_of_x);
      } else {
#pragma GCC unroll 2
        for (size_t side = 0; side < kSides; ++side) {
          const Floats sum = to_floats(sums[row][side]);
          if constexpr (kIntegers) {
            total[side] = add_scaled(total[side], sum, scales.of[first + side], rounded.scales[at + row], sum_of_x);
          } else {
            total[side] = add_scaled(total[side], sum * scales.unit, scales.of[first + side], sum_of_x);
          }
        }
      }
    }
  }
}

// Calls with_width(width), known to the compiler: the one of the widths of this set that `width` is.
template <typename WithWidth, size_t... Width>
inline void choose_width(size_t width, const WithWidth& with_width, std::index_sequence<Width...>) {
  ((width == Width ? with_width(std::integral_constant<size_t, Width>()) : void()), ...);
}

// Units of the segments from one on whose looked up values fit half of the first level of the caches together; those of
// one at least.
template <typename Kind>
inline size_t units_of_block(const Segments& segments, Segment segment) {
  constexpr size_t kUnits = kMostUnits * 4 / Kind::kLines;
  size_t units = segment.units;
  for (segment = segments.after(segment); segment.index < segments.count; segment = segments.after(segment)) {
    if (units + segment.units > kUnits) break;
    units += segment.units;
  }
  return units;
}

// Writes the totals of a panel, [row][2], once they are whole.
inline void store_panel(const Weights& weights, const Rounded& rounded, size_t tile, size_t sides, size_t panel,
                        const Floats* totals, float* y) {
  const size_t first = panel * rounded.panel, left = rounded.rows() - first, width = rounded.width(panel);
  const size_t rows = left < width ? left : width, per_row = rounded.rows_of_one();
  for (size_t row = 0; row < rows; row += per_row, totals += 2 * per_row) {
    float* const row_of_y = y + (first + row) / per_row * weights.columns;
    for (size_t side = 0; side < sides; ++side) {
      store_row(weights, per_row == 2 ? totals[side] + totals[2 + side] : totals[side], tile + side, row_of_y);
    }
  }
}

// Rows of y are written as soon as they are whole, a panel at a time: they are far from one another in memory, and the
// processor waits for them while it multiplies the next panel.
template <typename Kind, bool Wide>
void multiply_block(const Weights& weights, const Rounded& rounded, const Filling& fill, size_t tile,
                    size_t first_panel, size_t end_panel, size_t sides, Floats* totals, float* y) {
  const Segments segments(weights);
  const bool has_second = !Wide && tile + 1 < weights.tiles();
  const bool integers = std::is_same_v<typename Kind::Sum, Integers>;
  const float inverse_step = integers ? static_cast<float>(1 / weights.table.step) : 1.0f;
  Block block;
  if (!Wide && !has_second) __builtin_memset(&block, 0, sizeof block);
  for (Segment segment = segments.first(); segment.index < segments.count;) {
    const size_t begin = segment.unit, units = units_of_block<Kind>(segments, segment);
    fill(weights, {tile, begin, units, block.lines});
    if (has_second) fill(weights, {tile + 1, begin, units, block.lines + kLine});
    for (; segment.index < segments.count && segment.unit < begin + units; segment = segments.after(segment)) {
      SegmentScales scales = {{column_scales(weights, tile, segments.groups, segment.group, inverse_step),
                               column_scales(weights, tile + has_second, segments.groups, segment.group, inverse_step)},
                              has_second ? 2u : 1u,
                              fill.shifted ? 1.0f : fill.unit};
      if (fill.shifted) {
        for (ColumnScales& column : scales.of) column = after_shift(column);
      }
      const uint8_t* const lines = block.lines + (segment.unit - begin) * Kind::kLines * 2 * kLine;
      for (size_t panel = first_panel; panel < end_panel; ++panel) {
        const uint32_t* const words = rounded.words_of(segment.unit, segment.units, panel);
        Floats* const totals_of_panel = totals + 2 * (panel - first_panel) * rounded.panel;
        const auto multiply = [&](auto width) {
          multiply_panel<Kind, Wide, decltype(width)::value>(
              rounded, segment.index * rounded.padded + panel * rounded.panel, lines, words, segment.units, scales,
              totals_of_panel);
        };
        choose_width(rounded.width(panel), multiply, Widths());
        if (segment.index + 1 == segments.count) {
          store_panel(weights, rounded, tile, sides, panel, totals_of_panel, y);
        }
      }
    }
  }
}

template <typename Kind, bool Wide>
void multiply_gemm(const Weights& weights, const Rounded& rounded, const Filling& fill, float* y, size_t first_tile,
                   size_t end_tile) {
  const size_t panels = rounded.panels(), panels_of_block = kRowsOfBlock / rounded.panel;
  Floats totals[2 * kRowsOfBlock];
  for (size_t tile = first_tile; tile < end_tile; tile += Wide ? 1 : 2) {
    const size_t sides = Wide || tile + 1 >= end_tile ? 1 : 2;
    for (size_t panel = 0; panel < panels; panel += panels_of_block) {
      const size_t end = panel + panels_of_block < panels ? panel + panels_of_block : panels;
      const size_t rows = (end - 1 - panel) * rounded.panel + rounded.width(end - 1);
      __builtin_memset(static_cast<void*>(totals), 0, 2 * rows * sizeof(Floats));
      multiply_block<Kind, Wide>(weights, rounded, fill, tile, panel, end, sides, totals, y);
    }
  }
}

}  // namespace
}  // namespace graphopt
