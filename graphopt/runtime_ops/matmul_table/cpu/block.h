// Looked up values of two tiles, which stay in the cache while panels of rows pass by.
#pragma once

#include "matmul_table/cpu/byte_operand.h"
#include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, float_decoders.h)

namespace graphopt {
namespace {

constexpr size_t kMostUnits = Weights::kSegment / 16;

// Values of one or two tiles, or of the two bytes of one: [line][2].
struct Block {
  alignas(64) uint8_t lines[2 * kMostUnits * 16 * kLine];
};

// The units of a tile that are put into a block, from `to` on.
struct Part {
  size_t tile, first_unit, units;
  uint8_t* to;
};

// Fills a part of a block. Floats are multiples of `unit`, or have their zero points in them where they are `shifted`.
struct Filling {
  void (*fill)(const Filling& filling, const Weights& weights, const Part& part);
  const void* decoder;
  bool shifted;
  float unit;

  void operator()(const Weights& weights, const Part& part) const { fill(*this, weights, part); }
};

// Calls with_line(codes, index of the unit) for each line of codes.
template <int Bits, bool Exact, typename WithLine>
inline void for_each_line_of(const Weights& weights, const Part& part, const WithLine& with_line) {
  constexpr size_t kUnitBytes = 32 * Bits;
  const uint8_t* unit = weights.codes + part.tile * weights.tile_bytes() + part.first_unit * kUnitBytes;
  for (size_t i = 0; i < part.units; ++i, unit += kUnitBytes) {
    // the codes of the next block, which no loop prefetches
#pragma GCC unroll 4
    for (size_t at = 0; at < kUnitBytes; at += kLine) {
      __builtin_prefetch(unit + part.units * kUnitBytes + at, 0, 2);
    }
    for_each_line([&](auto j) {
      with_line(codes_of_line<Bits, Exact, decltype(j)::value>(unit), part.first_unit + i);
    });
  }
}

template <int Bits, typename Operand>
void fill_with_operand(const Filling& filling, const Weights& weights, const Part& part) {
  const Operand operand = *static_cast<const Operand*>(filling.decoder);
  uint8_t* to = part.to;
  for_each_line_of<Bits, Operand::kExact>(weights, part, [&](const Bytes& codes, size_t) __attribute__((always_inline)) {
    const auto& values = operand(codes);
    to = operand.store(values, to);
  });
}

template <int Bits, typename Decoder>
void fill_with_floats(const Filling& filling, const Weights& weights, const Part& part) {
  const Decoder decoder = *static_cast<const Decoder*>(filling.decoder);
  uint8_t* to = part.to;
  size_t group = ~size_t{0};
  ColumnScales of = {};
  for_each_line_of<Bits, Decoder::kExact>(weights, part, [&](const Bytes& codes, size_t unit)
                                                             __attribute__((always_inline)) {
    if (filling.shifted && unit * 16 / weights.group != group) {
      group = unit * 16 / weights.group;
      read_column_scales(weights, part.tile, group, &of);
    }
    Rows rows = decoder(codes);
    if (filling.shifted) {
      for (Floats& row : rows.row) row = shift_values(row, filling.unit, of);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i, to += 2 * kLine) store_line(to, rows.row[i]);
  });
}

}  // namespace
}  // namespace graphopt
