// Many rows: the values of two tiles are looked up once and stay in the cache while panels of rows pass by.
#pragma once

#include "matmul_table/cpu/decode.h"
#include "matmul_table/cpu/scaled.h"

namespace graphopt {
namespace {

// The operand types of a product: how many numbers a 32-bit word holds, and how a word is multiplied with a line.
template <bool Small>
struct Int8 {
  static constexpr size_t kLines = 4;  // of a unit
  using Sum = Integers;
  static Sum multiply(const Sum& sum, const Bytes& line, uint32_t word) { return dot<Small>(sum, line, word); }
};
struct Bfloat16 {
  static constexpr size_t kLines = 8;
  using Sum = Floats;
  static Sum multiply(const Sum& sum, const Bytes& line, uint32_t word) { return dot_bfloat16(sum, line, word); }
};
struct Float {
  static constexpr size_t kLines = 16;
  using Sum = Floats;
  static Sum multiply(const Sum& sum, const Bytes& line, uint32_t word) {
    const auto part = [&](size_t i) { return reinterpret_cast<Floats::Part>(line.part[i]); };
    return dot_float(sum, by_parts<Floats>(part), word);
  }
};

// Rows of x that go by a block of weights: their totals and the block fit the second level of the caches.
constexpr size_t kRowsOfBlock = 504;
constexpr size_t kMostUnits = Weights::kSegment / 16;

// Looked up values of one or two tiles, or of the two bytes of one: [line][2].
struct Block {
  alignas(64) uint8_t lines[2 * kMostUnits * 16 * kLine];
};

template <typename Kind, int Bits, bool Wide>
void look_up_block(const Weights& weights, size_t tile, size_t first_unit, size_t units, size_t side, Block* block) {
  const Table& table = weights.table;
  constexpr size_t kUnitBytes = 32 * Bits;
  const uint8_t* unit = weights.codes + tile * weights.tile_bytes() + first_unit * kUnitBytes;
  uint8_t* to = block->lines + side * kLine;
  constexpr bool kExact = !ignores_upper_bits(Bits);
  ColumnScales of = {};
  for (size_t i = 0; i < units; ++i, unit += kUnitBytes) {
    const size_t row = (first_unit + i) * 16;
    if (Kind::kLines == 16 && (i == 0 || row % weights.group == 0)) {
      of = column_scales(weights, tile, row / weights.group, 1);
    }
    // the codes of the next block, which no loop prefetches
#pragma GCC unroll 4
    for (size_t at = 0; at < kUnitBytes; at += kLine) __builtin_prefetch(unit + units * kUnitBytes + at, 0, 2);
    for_each_line([&](auto j) {
      const Bytes codes = codes_of_line<Bits, kExact, decltype(j)::value>(unit);
      if constexpr (Kind::kLines == 4) {
        store_line(to, look_up<Bits>(table.low.table, codes));
        if constexpr (Wide) store_line(to + kLine, look_up<Bits>(table.high.table, codes));
        to += 2 * kLine;
      } else {
#pragma GCC unroll 4
        for (size_t part = 0; part < Kind::kLines / 4; ++part, to += 2 * kLine) {
          if constexpr (Kind::kLines == 8) store_line(to, values_of<Bits, 2>(table.bfloat16s, codes, part));
          if constexpr (Kind::kLines == 16) {
            store_line(to, values_of<Bits, 4>(table.floats, codes, part));
            // done to each value, as a sum of floats would lose what is taken off afterwards
            if (of.minimums) {
              store_line(to, load_line<Floats>(to) * of.scale + of.zero_point);
            } else if (of.with_zero_point) {
              store_line(to, load_line<Floats>(to) - of.zero_point);
            }
          }
        }
      }
    });
  }
}

template <typename Kind, size_t Width>
inline void multiply_lines(typename Kind::Sum (*sums)[2], const uint8_t* line, const uint32_t* word, size_t count) {
  for (size_t left = count; left; --left, line += 2 * kLine, word += Width) {
    const Bytes first = load_line<Bytes>(line), second = load_line<Bytes>(line + kLine);
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
      sums[row][0] = Kind::multiply(sums[row][0], first, word[row]);
      sums[row][1] = Kind::multiply(sums[row][1], second, word[row]);
    }
  }
}

// One panel of rows and one segment; `totals`: [row][2], `at`: of its first row among those of the segment.
template <typename Kind, bool Wide, size_t Width>
void multiply_panel(const Rounded& rounded, size_t at, const uint8_t* lines, const uint32_t* words, size_t count,
                    const ColumnScales* of, Floats* totals) {
  typename Kind::Sum sums[Width][2] = {};
  if constexpr (Kind::kLines == 4) {
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
      sums[row][0] = all_lanes(rounded.starts[0][at + row]);
      sums[row][1] = all_lanes(rounded.starts[Wide][at + row]);
    }
  }
  multiply_lines<Kind, Width>(sums, lines, words, count);
#pragma GCC unroll 12
  for (size_t row = 0; row < Width; ++row) {
    Floats* const total = totals + 2 * row;
    const Floats first = to_floats(sums[row][0]), second = to_floats(sums[row][1]);
    const float sum_of_x = rounded.sums[at + row];
    if constexpr (Kind::kLines != 4) {
      total[0] = add_scaled(total[0], first, of[0], sum_of_x);
      total[1] = add_scaled(total[1], second, of[1], sum_of_x);
    } else if constexpr (Wide) {
      total[0] = add_scaled(total[0], second * 256.0f + first, of[0], rounded.scales[at + row], sum_of_x);
    } else {
      total[0] = add_scaled(total[0], first, of[0], rounded.scales[at + row], sum_of_x);
      total[1] = add_scaled(total[1], second, of[1], rounded.scales[at + row], sum_of_x);
    }
  }
}

template <typename Kind, bool Wide>
void multiply_panel(size_t width, const Rounded& rounded, size_t at, const uint8_t* lines, const uint32_t* words,
                    size_t count, const ColumnScales* of, Floats* totals) {
  const auto with = [&](auto fixed) {
    multiply_panel<Kind, Wide, decltype(fixed)::value>(rounded, at, lines, words, count, of, totals);
  };
  if (width == 1) return with(std::integral_constant<size_t, 1>());
  if (width == 2) return with(std::integral_constant<size_t, 2>());
#if defined(__AVX512F__)
  if (width == 4) return with(std::integral_constant<size_t, 4>());
  if (width == 8) return with(std::integral_constant<size_t, 8>());
  if (width == 12) return with(std::integral_constant<size_t, 12>());
#endif
}

// Segments from `index` on whose looked up values fit half of the first level of the caches together; one at least.
template <typename Kind>
inline size_t segments_of_block(const Weights& weights, size_t index) {
  constexpr size_t kUnits = kMostUnits * 4 / Kind::kLines;
  size_t units = segment_at(weights, index).units, count = 1;
  for (const size_t all = weights.segments(); index + count < all; ++count) {
    units += segment_at(weights, index + count).units;
    if (units > kUnits) break;
  }
  return count;
}

template <typename Kind, int Bits, bool Wide>
void multiply_block(const Weights& weights, const Rounded& rounded, size_t tile, size_t first_panel, size_t end_panel,
                    Floats* totals) {
  const size_t segments = weights.segments();
  const bool second = !Wide && tile + 1 < weights.tiles();
  const float inverse_step = Kind::kLines == 4 ? static_cast<float>(1 / weights.table.step) : 1.0f;
  Block block;
  if (!Wide && !second) __builtin_memset(&block, 0, sizeof block);
  for (size_t index = 0; index < segments;) {
    const size_t end = index + segments_of_block<Kind>(weights, index);
    const Segment begin = segment_at(weights, index), last = segment_at(weights, end - 1);
    const size_t units = last.unit + last.units - begin.unit;
    look_up_block<Kind, Bits, Wide>(weights, tile, begin.unit, units, 0, &block);
    if (second) look_up_block<Kind, Bits, Wide>(weights, tile + 1, begin.unit, units, 1, &block);
    for (; index < end; ++index) {
      const Segment segment = segment_at(weights, index);
      ColumnScales of[2] = {column_scales(weights, tile, segment.group, inverse_step),
                            column_scales(weights, tile + second, segment.group, inverse_step)};
      if (Kind::kLines == 16) {
        for (ColumnScales& each : of) {
          if (each.minimums) each.scale = all_lanes(1.0f);
          each.with_zero_point = each.minimums = false;
        }
      }
      const uint8_t* const lines = block.lines + (segment.unit - begin.unit) * Kind::kLines * 2 * kLine;
      for (size_t panel = first_panel; panel < end_panel; ++panel) {
        multiply_panel<Kind, Wide>(rounded.width(panel), rounded, index * rounded.padded + panel * rounded.panel,
                                   lines, rounded.words_of(segment.unit, segment.units, panel),
                                   segment.units * Kind::kLines, of,
                                   totals + 2 * (panel - first_panel) * rounded.panel);
      }
    }
  }
}

template <typename Kind, int Bits, bool Wide>
void multiply_many(const Weights& weights, const Rounded& rounded, float* y, size_t first_tile, size_t end_tile) {
  const size_t panels = rounded.panels(), of_block = kRowsOfBlock / rounded.panel, rows = rounded.rows();
  const bool two = rounded.kind == Activations::kInt16;
  Floats totals[2 * kRowsOfBlock];
  for (size_t tile = first_tile; tile < end_tile; tile += Wide ? 1 : 2) {
    for (size_t panel = 0; panel < panels; panel += of_block) {
      const size_t end = panel + of_block < panels ? panel + of_block : panels, first_row = panel * rounded.panel;
      const size_t here = (end - 1 - panel) * rounded.panel + rounded.width(end - 1);
      __builtin_memset(static_cast<void*>(totals), 0, 2 * here * sizeof(Floats));
      multiply_block<Kind, Bits, Wide>(weights, rounded, tile, panel, end, totals);
      for (size_t side = 0; side < (Wide || tile + 1 >= end_tile ? 1u : 2u); ++side) {
        for (size_t row = 0; row < here && first_row + row < rows; row += two ? 2 : 1) {
          const Floats total = two ? totals[2 * row + side] + totals[2 * row + 2 + side] : totals[2 * row + side];
          finish(weights, total, tile + side, y + (first_row + row) / (two ? 2 : 1) * weights.columns);
        }
      }
    }
  }
}

}  // namespace
}  // namespace graphopt
