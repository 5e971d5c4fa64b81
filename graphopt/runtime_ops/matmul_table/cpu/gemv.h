// GEMV: one row of floats. Codes become floats in registers and are multiplied at once.
#pragma once

#include "matmul_table/cpu/small_m.h"
#include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, float_decoders.h)

namespace graphopt {
namespace {

// What floats are made of: the codes of a unit, a line at a time; see TrellisSource.
template <int Bits, typename Decoder>
struct CodeSource {
  static constexpr bool kIntegers = Decoder::kIntegers;
  const Decoder& decoder;

  float unit() const { return decoder.unit(); }
  GRAPHOPT_FORCE_INLINE const uint8_t* read(const uint8_t* unit) const { return unit; }
  template <size_t J>
  GRAPHOPT_FORCE_INLINE Rows rows(const uint8_t* unit) const {
    return decoder(codes_of_line<Bits, Decoder::kExact, J>(unit));
  }
};

// Two tiles at a time: a sum waits for its last product, and meanwhile the other goes on. Products are added in the
// order that `multiply_gemm` has, so a row gives the same bits whatever rows stand beside it.
template <int Bits, bool Shifted, typename Source>
void multiply_gemv(const Weights& weights, const Rounded& rounded, const Source& source, float* y, size_t first_tile,
                   size_t end_tile) {
  constexpr size_t kUnitBytes = 32 * Bits;
  const Segments segments(weights);
  const float unit = source.unit();
  for (size_t tile = first_tile; tile < end_tile; tile += 2) {
    const size_t tiles[2] = {tile, tile + 1 < end_tile ? tile + 1 : tile};
    const uint8_t* codes[2] = {weights.codes + tiles[0] * weights.tile_bytes(),
                               weights.codes + tiles[1] * weights.tile_bytes()};
    const uint32_t* word = rounded.words;
    Floats totals[2] = {};
    for (Segment segment = segments.first(); segment.index < segments.count; segment = segments.after(segment)) {
      ColumnScales of[2] = {column_scales(weights, tiles[0], segments.groups, segment.group, 1),
                            column_scales(weights, tiles[1], segments.groups, segment.group, 1)};
      Floats sums[2] = {};
      for (size_t left = segment.units; left; --left, word += 16, codes[0] += kUnitBytes, codes[1] += kUnitBytes) {
        prefetch_ahead<kUnitBytes>(codes[0]);
        prefetch_ahead<kUnitBytes>(codes[1]);
        const decltype(source.read(codes[0])) units[2] = {source.read(codes[0]), source.read(codes[1])};
        for_each_line([&](auto j) {
          constexpr size_t J = decltype(j)::value;
#pragma GCC unroll 2
          for (size_t side = 0; side < 2; ++side) {
            const Rows rows = source.template rows<J>(units[side]);
#pragma GCC unroll 4
            for (size_t i = 0; i < 4; ++i) {
              const Floats line = Shifted ? shift_values(rows.row[i], unit, of[side]) : rows.row[i];
              sums[side] = dot_float(sums[side], line, word[4 * J + i]);
            }
          }
        });
      }
#pragma GCC unroll 2
      for (size_t side = 0; side < 2; ++side) {
        const ColumnScales rest_scales = Shifted ? after_shift(of[side]) : of[side];
        const Floats sum = Shifted ? sums[side] : sums[side] * unit;
        totals[side] = add_scaled(totals[side], sum, rest_scales, rounded.sums[segment.index]);
      }
    }
    for (size_t side = 0; side < 2; ++side) store_row(weights, totals[side], tiles[side], y);
  }
}

}  // namespace
}  // namespace graphopt
