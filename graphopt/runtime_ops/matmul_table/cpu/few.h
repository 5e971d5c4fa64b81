// Few rows of integers: every code is read, looked up and multiplied at once, as fast as memory hands it over.
#pragma once

#include "matmul_table/cpu/operands.h"
#include "matmul_table/cpu/scaled.h"

namespace graphopt {
namespace {

// How far ahead of its use a line is prefetched: further than the processor does by itself.
constexpr size_t kAhead = 1536;

template <size_t Bytes>
GRAPHOPT_UNCALLED void prefetch_ahead(const uint8_t* unit) {
#pragma GCC unroll 4
  for (size_t at = 0; at < Bytes; at += kLine) __builtin_prefetch(unit + kAhead + at);
}

template <typename Operand, size_t Count>
inline Integers total_of(const Integers (&sums)[Count]) {
  if constexpr (Operand::kSums > 1) return Operand::total(sums);
  Integers total = sums[0];
#pragma GCC unroll 4
  for (size_t i = 1; i < Count; ++i) {
    total = by_parts<Integers>([&](size_t part) { return total.part[part] + sums[i].part[part]; });
  }
  return total;
}

// Adds the products of a unit to the sums of each row.
template <int Bits, typename Operand, size_t Width, size_t kSums>
GRAPHOPT_UNCALLED void multiply_unit(Integers (&sums)[Operand::kPlanes][Width][kSums], const Operand& operand,
                                   const uint8_t* unit, const uint32_t* word) {
  for_each_line([&](auto j) {
    constexpr size_t J = decltype(j)::value;
    const auto values = operand(codes_of_line<Bits, Operand::kExact, J>(unit));
#pragma GCC unroll 2
    for (size_t plane = 0; plane < Operand::kPlanes; ++plane) {
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        Integers& sum = sums[plane][row][J % kSums];
        sum = Operand::multiply(plane, sum, values, word + J * Operand::kWords * Width + row, Width);
        settle(sum);
      }
    }
  });
}

#if GRAPHOPT_BY_PAIRS
// The same where bytes are 32 at most, see Int8Runs: the sums of a unit have 16 bits, so those of six rows fit registers.
template <int Bits, typename Operand, size_t Width>
GRAPHOPT_UNCALLED void multiply_unit_of_runs(Integers (&sums)[1][Width][1], const Operand& operand, const uint8_t* unit,
                                           const uint32_t* word) {
  __m256i runs[Width][2];  // not lines: the compiler would copy them through memory
  for_each_line([&](auto j) __attribute__((always_inline)) {
    constexpr size_t J = decltype(j)::value;
    const Bytes values = operand(codes_of_line<Bits, Operand::kExact, J>(unit)).plane[0];
    const __m256i left = reinterpret_cast<__m256i>(values.part[0]), right = reinterpret_cast<__m256i>(values.part[1]);
#pragma GCC unroll 8
    for (size_t row = 0; row < Width; ++row) {
      const __m256i x = _mm256_set1_epi32(static_cast<int>(word[J * Width + row]));
      __m256i of_left = _mm256_maddubs_epi16(left, x), of_right = _mm256_maddubs_epi16(right, x);
      if constexpr (J > 0) {
        of_left = _mm256_add_epi16(runs[row][0], of_left), of_right = _mm256_add_epi16(runs[row][1], of_right);
      }
      asm("" : "+x"(of_left), "+x"(of_right));  // see settle
      runs[row][0] = of_left, runs[row][1] = of_right;
    }
  });
#pragma GCC unroll 8
  for (size_t row = 0; row < Width; ++row) {
    Integers& sum = sums[0][row][0];
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      sum.part[i] += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(runs[row][i], _mm256_set1_epi16(1)));
    }
  }
}
#endif

// One panel of rows. `Runs`: bytes are 32 at most.
template <int Bits, typename Operand, size_t Width, bool Runs = false>
void multiply_few(const Weights& weights, const Rounded& rounded, float* y, size_t first_tile, size_t end_tile,
                  size_t panel = 0) {
  constexpr size_t kUnitBytes = 32 * Bits, kWords = Operand::kWords, kPlanes = Operand::kPlanes;
  // Sums side by side, which wait for one another less; of integers, so that their order is no matter.
  constexpr size_t kSums = kByPairs       ? Operand::kSums
                           : GRAPHOPT_NEON ? (Width < 2 ? 2 : 1)
                           : Width < 4     ? 4 / Width
                                           : 1;
  static_assert(!Runs || Operand::kPairsFit);
  const Operand operand(weights.table);
  const float inverse_step = static_cast<float>(1 / weights.table.step);
  const size_t rows = rounded.rows(), segments = weights.segments(), first_row = panel * rounded.panel;
  const bool two = rounded.kind == Activations::kInt16, alone = rounded.panels() == 1;
  for (size_t tile = first_tile; tile < end_tile; ++tile) {
    const uint8_t* unit = weights.codes + tile * weights.tile_bytes();
    const uint32_t* word = rounded.words;
    Floats totals[Width] = {};
    for (size_t index = 0; index < segments; ++index) {
      const Segment segment = segment_at(weights, index);
      const size_t of_rows = alone ? index * Width : index * rounded.padded + first_row;
      if (!alone) word = rounded.words_of(segment.unit, segment.units, panel);
      Integers sums[kPlanes][Width][kSums] = {};
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
        for (size_t plane = 0; plane < kPlanes; ++plane) {
          if constexpr (!Operand::kFromZero) sums[plane][row][0] = all_lanes(rounded.starts[plane][of_rows + row]);
        }
      }
      for (size_t left = segment.units; left; --left, unit += kUnitBytes, word += kUnitLines * kWords * Width) {
        prefetch_ahead<kUnitBytes>(unit);
#if GRAPHOPT_BY_PAIRS
        if constexpr (Runs) {
          multiply_unit_of_runs<Bits>(sums, operand, unit, word);
          continue;
        }
        if constexpr (Operand::kFromZero) {
          operand.multiply_unit(sums, unit, word);
          continue;
        }
#endif
        if constexpr (!Operand::kFromZero) multiply_unit<Bits>(sums, operand, unit, word);
      }
      const ColumnScales of = column_scales(weights, tile, segment.group, inverse_step);
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        Floats sum = to_floats(total_of<Operand>(sums[0][row]));
        if constexpr (kPlanes == 2) sum = to_floats(total_of<Operand>(sums[1][row])) * 256.0f + sum;
        totals[row] = add_scaled(totals[row], sum, of, rounded.scales[of_rows + row], rounded.sums[of_rows + row]);
      }
    }
#pragma GCC unroll 8
    for (size_t row = 0; row < Width; ++row) {
      if (two) {
        if (row % 2 || first_row + row >= rows) continue;
        const Floats both = totals[row] + totals[row + 1 < Width ? row + 1 : row];
        finish(weights, both, tile, y + (first_row + row) / 2 * weights.columns);
      } else if (first_row + row < rows) {
        finish(weights, totals[row], tile, y + (first_row + row) * weights.columns);
      }
    }
  }
}

}  // namespace
}  // namespace graphopt
