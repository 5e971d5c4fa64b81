// Few rows of 8 bits: every code is read, looked up and multiplied at once, as fast as memory hands it over.
#pragma once

#include "matmul/decode.h"
#include "matmul/scaled.h"

namespace graphopt {
namespace {

// How far ahead of its use a line is asked for: past what the processor sees coming by itself.
constexpr size_t kAhead = 1536;

template <int Bits, bool Wide, bool ByXor, size_t Width>
void multiply_few(const Weights& weights, const Rounded& rounded, float* y, size_t first_tile, size_t end_tile) {
  constexpr size_t kUnitBytes = 32 * Bits;
  const Table& table = weights.table;
  const float inverse_step = static_cast<float>(1 / table.step);
  const size_t rows = rounded.rows(), segments = weights.segments();
  const bool two = rounded.kind == Activations::kInt16;
  for (size_t tile = first_tile; tile < end_tile; ++tile) {
    const uint8_t* unit = weights.codes + tile * weights.tile_bytes();
    const uint32_t* word = rounded.words;
    Floats totals[Width] = {};
    for (size_t index = 0; index < segments; ++index) {
      const Segment segment = segment_at(weights, index);
      const float *const scales = rounded.scales + index * Width, *const sums = rounded.sums + index * Width;
      Integers low[Width], high[Wide ? Width : 1];
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        const int32_t sum = static_cast<int32_t>(sums[row]);
        low[row] = all_lanes(-table.low.offset * sum);
        if constexpr (Wide) high[row] = all_lanes(-table.high.offset * sum);
      }
      for (size_t left = segment.units; left; --left, unit += kUnitBytes, word += kUnitLines * Width) {
#pragma GCC unroll 4
        for (size_t at = 0; at < kUnitBytes; at += kLine) __builtin_prefetch(unit + kAhead + at);
        for_each_line([&](auto j) {
          constexpr size_t J = decltype(j)::value;
          const Bytes codes = codes_of_line<Bits, !(ignores_upper_bits(Bits) && !ByXor), J>(unit);
          const Bytes below = integers_of<Bits, ByXor>(table.low, codes);
#pragma GCC unroll 8
          for (size_t row = 0; row < Width; ++row) low[row] = dot(low[row], below, word[J * Width + row]);
          if constexpr (Wide) {
            const Bytes above = integers_of<Bits, false>(table.high, codes);
#pragma GCC unroll 8
            for (size_t row = 0; row < Width; ++row) high[row] = dot(high[row], above, word[J * Width + row]);
          }
        });
      }
      const ColumnScales of = column_scales(weights, tile, segment.group, inverse_step);
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        Floats sum = to_floats(low[row]);
        if constexpr (Wide) sum = to_floats(high[row]) * 256.0f + sum;
        totals[row] = add_scaled(totals[row], sum, of, scales[row], sums[row]);
      }
    }
#pragma GCC unroll 8
    for (size_t row = 0; row < Width; ++row) {
      if (two) {
        if (row % 2 || row >= rows) continue;
        finish(weights, totals[row] + totals[row + 1 < Width ? row + 1 : row], tile, y + row / 2 * weights.columns);
      } else if (row < rows) {
        finish(weights, totals[row], tile, y + row * weights.columns);
      }
    }
  }
}

}  // namespace
}  // namespace graphopt
