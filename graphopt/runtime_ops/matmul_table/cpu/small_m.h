// Small M: a few rows of integers. Every code is read, looked up and multiplied at once, as fast as memory gives it.
#pragma once

#include <type_traits>

#include "matmul_table/cpu/epilogue.h"
#include GRAPHOPT_ARCH_HEADER(matmul_table/cpu/arch, kernels.h)

namespace graphopt {
namespace {

// How far ahead of its use a line is prefetched: further than the processor does by itself.
constexpr size_t kAhead = 1536;

template <size_t Bytes>
GRAPHOPT_FORCE_INLINE void prefetch_ahead(const uint8_t* unit) {
#pragma GCC unroll 4
  for (size_t at = 0; at < Bytes; at += kLine) __builtin_prefetch(unit + kAhead + at);
}

template <typename Operand, size_t Count>
inline Integers total_of(const Operand& operand, const Integers (&sums)[Count]) {
  if constexpr (Operand::kSums > 1) return operand.total(sums);
  Integers total = sums[0];
#pragma GCC unroll 4
  for (size_t i = 1; i < Count; ++i) {
    total = by_parts<Integers>([&](size_t part) { return total.part[part] + sums[i].part[part]; });
  }
  return total;
}

// Adds the products of a unit to the sums of each row.
template <int Bits, typename Operand, size_t Width, size_t kSums>
GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[Operand::kPlanes][Width][kSums], const Operand& operand,
                                         const uint8_t* unit, const uint32_t* word) {
  for_each_line([&](auto j) {
    constexpr size_t J = decltype(j)::value;
    const auto values = operand(codes_of_line<Bits, Operand::kExact, J>(unit));
#pragma GCC unroll 2
    for (size_t plane = 0; plane < Operand::kPlanes; ++plane) {
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
        Integers& sum = sums[plane][row][J % kSums];
        sum = Operand::multiply(plane, sum, values, word + J * Operand::kWords * Width + row, Width);
        settle(sum);
      }
    }
  });
}

// Units that an operand multiplies in one run where its table allows it, without sums in memory; 1 where it has no such runs.
template <typename Operand, typename = void>
constexpr size_t kUnitsOfRun = 1;
template <typename Operand>
constexpr size_t kUnitsOfRun<Operand, std::void_t<decltype(Operand::kUnitsOfRun)>> = Operand::kUnitsOfRun;

// Writes the rows of a panel: of 16 bits the upper and the lower half are rows by themselves.
template <size_t Width>
GRAPHOPT_FORCE_INLINE void store_rows(const Weights& weights, const Rounded& rounded, const Floats (&totals)[Width],
                                      size_t tile, size_t first_row, float* y) {
  const size_t rows = rounded.rows();
  const bool is_int16 = rounded.kind == Activations::kInt16;
#pragma GCC unroll 12
  for (size_t row = 0; row < Width; ++row) {
    if (is_int16) {
      if (row % 2 || first_row + row >= rows) continue;
      const Floats pair_sums = totals[row] + totals[row + 1 < Width ? row + 1 : row];
      store_row(weights, pair_sums, tile, y + (first_row + row) / 2 * weights.columns);
    } else if (first_row + row < rows) {
      store_row(weights, totals[row], tile, y + (first_row + row) * weights.columns);
    }
  }
}

// A panel of rows and groups of whole runs that have nothing but scales. Nothing is called and nothing but scales is read for a group; where a
// group is `One` run, its sums do not leave the registers.
template <int Bits, typename Operand, size_t Width, bool One>
void multiply_runs(const Weights& weights, const Rounded& rounded, const Operand& operand, float* y, size_t first_tile,
                   size_t end_tile, size_t panel) {
  constexpr size_t kUnits = kUnitsOfRun<Operand>, kRunBytes = kUnits * 32 * Bits;
  const size_t groups = weights.groups(), runs = weights.group / (16 * kUnits);
  const size_t first_row = panel * rounded.panel, padded = rounded.padded;
  const size_t words_of_others = (padded - Width) * runs * kUnits * kUnitLines;
  const float* const scales = weights.scales;
  const Half* const half_scales = weights.half_scales;
  for (size_t tile = first_tile; tile < end_tile; ++tile) {
    const uint8_t* unit = weights.codes + tile * weights.tile_bytes();
    const uint32_t* word = rounded.words_of(0, runs * kUnits, panel);
    const float* scales_of_x = rounded.scales + first_row;
    const int32_t* starts = rounded.starts[0] + first_row;
    Floats totals[Width] = {};
    for (size_t group = tile * groups; group < (tile + 1) * groups; ++group) {
      Integers sums[1][Width][1];
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) sums[0][row][0] = {};
      for (size_t run = One ? 1 : runs; run; --run, unit += kRunBytes, word += kUnits * kUnitLines * Width) {
        prefetch_ahead<kRunBytes>(unit);
        operand.template multiply_units<kUnits>(sums, unit, word);
      }
      const Floats scale = scales ? load_line<Floats>(scales + group * kColumns) : load_halves(half_scales + group * kColumns);
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
        const int32_t start = starts[row];
        const auto sum = by_parts<Integers>([&](size_t i) { return sums[0][row][0].part[i] + start; });
        totals[row] = add_scaled(totals[row], to_floats(sum), {scale, {}, false, false}, scales_of_x[row], 0);
        asm volatile("" : : : "memory");  // see settle
      }
      word += words_of_others, starts += padded, scales_of_x += padded;
    }
    store_rows(weights, rounded, totals, tile, first_row, y);
  }
}

// One panel of rows.
template <int Bits, typename Operand, size_t Width>
void multiply_small_m(const Weights& weights, const Rounded& rounded, float* y, size_t first_tile, size_t end_tile,
                      size_t panel = 0) {
  constexpr size_t kUnitBytes = 32 * Bits, kWords = Operand::kWords, kPlanes = Operand::kPlanes;
  constexpr size_t kSums = kSumsOf<Operand, Width>;
  const Operand operand(weights.table);
  if constexpr (kUnitsOfRun<Operand> > 1) {
    if (Operand::sums_groups(weights)) {
      const bool is_run = weights.group == 16 * kUnitsOfRun<Operand>;
      return (is_run ? multiply_runs<Bits, Operand, Width, true> : multiply_runs<Bits, Operand, Width, false>)(
          weights, rounded, operand, y, first_tile, end_tile, panel);
    }
  }
  const float inverse_step = static_cast<float>(1 / weights.table.step);
  const Segments segments(weights);
  const size_t first_row = panel * rounded.panel;
  const bool is_only_panel = rounded.panels() == 1;
  for (size_t tile = first_tile; tile < end_tile; ++tile) {
    const uint8_t* unit = weights.codes + tile * weights.tile_bytes();
    const uint32_t* word = rounded.words;
    Floats totals[Width] = {};
    for (Segment segment = segments.first(); segment.index < segments.count; segment = segments.after(segment)) {
      const size_t first_of_rows = segment.index * (is_only_panel ? Width : rounded.padded) + first_row;
      if (!is_only_panel) word = rounded.words_of(segment.unit, segment.units, panel);
      Integers sums[kPlanes][Width][kSums] = {};
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
        for (size_t plane = 0; plane < kPlanes; ++plane) {
          if constexpr (Operand::kFromZero) continue;
          sums[plane][row][0] = all_lanes(rounded.starts[plane][first_of_rows + row]);
        }
      }
      for (size_t units = segment.units; units; --units, unit += kUnitBytes, word += kUnitLines * kWords * Width) {
        prefetch_ahead<kUnitBytes>(unit);
        if constexpr (Operand::kMultipliesUnits) {
          operand.multiply_unit(sums, unit, word);
        } else {
          multiply_unit<Bits>(sums, operand, unit, word);
        }
      }
      const ColumnScales of = column_scales(weights, tile, segments.groups, segment.group, inverse_step);
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
        Floats sum = to_floats(total_of(operand, sums[0][row]));
        if constexpr (kPlanes == 2) sum = to_floats(total_of(operand, sums[1][row])) * 256.0f + sum;
        const size_t at = first_of_rows + row;
        totals[row] = add_scaled(totals[row], sum, of, rounded.scales[at], rounded.sums[at]);
      }
    }
    store_rows(weights, rounded, totals, tile, first_row, y);
  }
}

}  // namespace
}  // namespace graphopt
