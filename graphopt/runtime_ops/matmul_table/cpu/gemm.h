// GEMM: many rows. Panels of rows pass by blocks of looked up values.
#pragma once

#include "matmul_table/cpu/block.h"
#include "matmul_table/cpu/epilogue.h"
#include GRAPHOPT_ARCH_HEADER(matmul_table/cpu/arch, kernels.h)

namespace graphopt {
namespace {

// Rows of x that go by a block of weights: their totals and the block fit the second level of the caches.
constexpr size_t kRowsOfBlock = 504;

// Whether a kind of product has no offset of bytes to take off its sums.
template <typename Kind>
constexpr bool starts_from_zero() {
  if constexpr (std::is_same_v<typename Kind::Sum, Integers>) return Kind::kFromZero;
  return true;
}

// What a block holds of a segment: where its lines begin, and the scales and zero points of both tiles.
struct SegmentOfBlock {
  size_t first_number, units;  // of x: where its numbers begin, where its words do and how many of them a row has
  const uint32_t* words;
  size_t words_of_row;
  const uint8_t* lines;
  Floats scales[2], zero_points[2];
};

// The segments of a block, and what is done to their sums: floats are multiplied by `unit`, then by their scales.
struct SegmentsOfBlock {
  SegmentOfBlock of[kMostUnits];
  size_t count, sides;
  bool with_zero_points, minimums;
  float unit;
};

// Scales what a segment of a block sums up, and adds it to the totals, [row][2].
template <bool Plain>
struct Scaling {
  const Rounded& rounded;
  const SegmentsOfBlock& block;
  const SegmentOfBlock& segment;
  size_t at;  // of the first row among the numbers of x

  // Plain: known to the compiler that there are no zero points.
  GRAPHOPT_FORCE_INLINE ColumnScales of(size_t tile) const {
    if constexpr (Plain) return {segment.scales[tile], {}, false, false};
    // part by part, see load_line
    return {load_line<Floats>(segment.scales + tile), load_line<Floats>(segment.zero_points + tile), true, block.minimums};
  }
  GRAPHOPT_FORCE_INLINE void add_integers(const Floats& sum, size_t tile, size_t row, Floats* total) const {
    const float sum_of_x = Plain ? 0 : rounded.sums[at + row];
    *total = add_scaled(*total, sum, of(tile), rounded.scales[at + row], sum_of_x);
  }
  GRAPHOPT_FORCE_INLINE void add_floats(const Floats& sum, size_t tile, size_t row, Floats* total) const {
    *total = add_scaled(*total, sum * block.unit, of(tile), Plain ? 0 : rounded.sums[at + row]);
  }
};

// One panel of rows and one segment, the sides from `first` on.
template <typename Kind, bool Wide, size_t Width, bool Plain>
GRAPHOPT_FORCE_INLINE void multiply_segment(const Scaling<Plain>& scaling, const uint32_t* words, size_t first,
                                            Floats* totals) {
  constexpr size_t kSides = Wide ? 2 : sides_at_once(Width);
  const Rounded& rounded = scaling.rounded;
  const SegmentOfBlock& segment = scaling.segment;
  typename Kind::Sum sums[Width][kSides] = {};
  if constexpr (!starts_from_zero<Kind>()) {
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
        sums[row][side] = all_lanes(rounded.starts[Wide ? side : 0][scaling.at + row]);
      }
    }
  }
  if constexpr (Wide && sides_at_once(Width) == 1) {  // registers hold the sums of one plane
    for (size_t plane = 0; plane < 2; ++plane) {
      typename Kind::Sum of_plane[Width][1];
      for (size_t row = 0; row < Width; ++row) of_plane[row][0] = sums[row][plane];
      Kind::template multiply<Width>(of_plane, segment.lines + plane * kLine, words, segment.units);
      for (size_t row = 0; row < Width; ++row) sums[row][plane] = of_plane[row][0];
    }
  } else {
    Kind::template multiply<Width>(sums, segment.lines + first * kLine, words, segment.units);
  }
#pragma GCC unroll 12
  for (size_t row = 0; row < Width; ++row) {
    Floats* const total = totals + 2 * row + first;
    if constexpr (Wide) {
      scaling.add_integers(to_floats(sums[row][1]) * 256.0f + to_floats(sums[row][0]), 0, row, total);
    } else {
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
        const Floats sum = to_floats(sums[row][side]);
        if constexpr (std::is_same_v<typename Kind::Sum, Integers>) {
          scaling.add_integers(sum, first + side, row, total + side);
        } else {
          scaling.add_floats(sum, first + side, row, total + side);
        }
      }
    }
  }
}

// The same for a segment of one run: its sums never leave the registers.
template <typename Kind, size_t Width, bool Plain>
GRAPHOPT_FORCE_INLINE void multiply_run(const Scaling<Plain>& scaling, const uint32_t* words, size_t first,
                                        Floats* totals) {
  constexpr size_t kSides = sides_at_once(Width), kLines = kRunUnits<Kind> * Kind::kLines;
  // Pointers of their own: what is reached through references is read again for each row.
  const int32_t* const starts = scaling.rounded.starts[0] + scaling.at;
  const float *const scales = scaling.rounded.scales + scaling.at, *const sums_of_x = scaling.rounded.sums + scaling.at;
  Floats* const total = totals + first;
  const auto with_row = [=](size_t row, const Integers (&sums)[kSides]) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (size_t side = 0; side < kSides; ++side) {
      const auto sum = by_parts<Integers>([&](size_t i) { return sums[side].part[i] + starts[row]; });
      Floats* const to = total + 2 * row + side;
      *to = add_scaled(*to, to_floats(sum), scaling.of(first + side), scales[row], Plain ? 0 : sums_of_x[row]);
    }
    asm volatile("" : : : "memory");  // see settle
  };
  Kind::template multiply_run<Width, kSides, kLines>(scaling.segment.lines + first * kLine, words, with_row);
}

// One panel of rows and the segments of a block, one after the other, so that only the first waits for what it needs.
template <typename Kind, bool Wide, size_t Width, bool Plain>
void multiply_panel(const Rounded& rounded, size_t panel, const SegmentsOfBlock& block, Floats* totals) {
  constexpr size_t kSides = Wide ? 2 : sides_at_once(Width);
  const size_t first_row = panel * rounded.panel;
  for (size_t first = 0; first < block.sides; first += kSides) {
    for (const SegmentOfBlock* segment = block.of; segment < block.of + block.count; ++segment) {
      const Scaling<Plain> scaling = {rounded, block, *segment, segment->first_number + first_row};
      const uint32_t* const words = segment->words + segment->words_of_row * first_row;
      if constexpr (kRunUnits<Kind> > 1) {
        if (segment->units == kRunUnits<Kind>) {
          multiply_run<Kind, Width>(scaling, words, first, totals);
          continue;
        }
      }
      asm volatile("" : : : "memory");  // totals of a segment before stay in memory alone
      multiply_segment<Kind, Wide, Width>(scaling, words, first, totals);
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
  SegmentsOfBlock parts;
  if (!Wide && !has_second) {  // the second side is multiplied all the same
    __builtin_memset(&block, 0, sizeof block);
    __builtin_memset(static_cast<void*>(&parts), 0, sizeof parts);
  }
  parts.sides = has_second ? 2 : 1;
  parts.unit = fill.shifted ? 1.0f : fill.unit;
  for (Segment segment = segments.first(); segment.index < segments.count;) {
    const size_t begin = segment.unit, units = units_of_block<Kind>(segments, segment);
    fill(weights, {tile, begin, units, block.lines});
    if (has_second) fill(weights, {tile + 1, begin, units, block.lines + kLine});
    parts.count = 0;
    for (; segment.index < segments.count && segment.unit < begin + units; segment = segments.after(segment)) {
      SegmentOfBlock& of_block = parts.of[parts.count++];
      of_block.first_number = segment.index * rounded.padded, of_block.units = segment.units;
      of_block.words = rounded.words_of(segment.unit, segment.units, 0);
      of_block.words_of_row = segment.units * rounded.words_of_unit();
      of_block.lines = block.lines + (segment.unit - begin) * Kind::kLines * 2 * kLine;
      for (size_t side = 0; side < parts.sides; ++side) {
        ColumnScales of = column_scales(weights, tile + side, segments.groups, segment.group, inverse_step);
        if (fill.shifted) of = after_shift(of);
        parts.with_zero_points = of.with_zero_point, parts.minimums = of.minimums;
        of_block.scales[side] = of.scale, of_block.zero_points[side] = of.zero_point;
      }
    }
    const bool is_last = segment.index == segments.count;
    for (size_t panel = first_panel; panel < end_panel; ++panel) {
      Floats* const totals_of_panel = totals + 2 * (panel - first_panel) * rounded.panel;
      choose_width(rounded.width(panel), [&](auto width) {
        constexpr size_t kWidth = decltype(width)::value;
        if (parts.with_zero_points) return multiply_panel<Kind, Wide, kWidth, false>(rounded, panel, parts, totals_of_panel);
        multiply_panel<Kind, Wide, kWidth, true>(rounded, panel, parts, totals_of_panel);
      }, Widths());
      if (is_last) store_panel(weights, rounded, tile, sides, panel, totals_of_panel, y);
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
