#pragma once

#include "matmul_table/cpu/float_rows.h"

namespace graphopt {
namespace {

// The bytes of a row side by side: they are [column][row], 4 by 4.
GRAPHOPT_FORCE_INLINE Bytes transpose(const Bytes& codes) {
  const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return by_parts<Bytes>([&](size_t part) {
    return reinterpret_cast<Bytes::Part>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(codes.part[part]), order));
  });
}

// Bytes of floats, the uppermost plane last, side by side. Two planes are the upper halves of the floats.
template <size_t Planes>
GRAPHOPT_FORCE_INLINE Rows interleave(const Bytes (&planes)[Planes]) {
  Rows rows;
#pragma GCC unroll 4
  for (size_t part = 0; part < kParts; ++part) {
    const auto plane = [&](size_t i) { return reinterpret_cast<uint8x16_t>(planes[i].part[part]); };
    uint16x8_t below[2] = {};
    if constexpr (Planes == 4) {
      below[0] = vreinterpretq_u16_u8(vzip1q_u8(plane(0), plane(1)));
      below[1] = vreinterpretq_u16_u8(vzip2q_u8(plane(0), plane(1)));
    }
    const uint16x8_t above[2] = {vreinterpretq_u16_u8(vzip1q_u8(plane(Planes - 2), plane(Planes - 1))),
                                 vreinterpretq_u16_u8(vzip2q_u8(plane(Planes - 2), plane(Planes - 1)))};
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      rows.row[2 * i].part[part] = reinterpret_cast<Floats::Part>(vzip1q_u16(below[i], above[i]));
      rows.row[2 * i + 1].part[part] = reinterpret_cast<Floats::Part>(vzip2q_u16(below[i], above[i]));
    }
  }
  return rows;
}

// Row `row` of a line, each value from a table in memory.
GRAPHOPT_FORCE_INLINE Floats gather(const float* table, const Bytes& codes, size_t row) {
  return by_parts<Floats>([&](size_t part) __attribute__((always_inline)) {
    Floats::Part floats;
    for (size_t lane = 0; lane < 4; ++lane) floats[lane] = table[codes.part[part][4 * lane + row]];
    return floats;
  });
}

}  // namespace
}  // namespace graphopt

#include "matmul_table/cpu/register_decoders.h"
