#pragma once

#include "matmul_table/cpu/float_rows.h"

namespace graphopt {
namespace {

// The bytes of a row side by side: they are [column][row], 4 by 4.
GRAPHOPT_FORCE_INLINE Bytes transpose(const Bytes& codes) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return by_parts<Bytes>([&](size_t part) {
    return reinterpret_cast<Bytes::Part>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(codes.part[part]), order));
  });
}

// Bytes of floats, the uppermost plane last, side by side. Two planes are the upper halves of the floats.
template <size_t Planes>
GRAPHOPT_FORCE_INLINE Rows interleave(const Bytes (&planes)[Planes]) {
  Rows rows;
#pragma GCC unroll 4
  for (size_t part = 0; part < kParts; ++part) {
    const auto plane = [&](size_t i) { return reinterpret_cast<__m256i>(planes[i].part[part]); };
    __m256i below[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if constexpr (Planes == 4) {
      below[0] = _mm256_unpacklo_epi8(plane(0), plane(1));
      below[1] = _mm256_unpackhi_epi8(plane(0), plane(1));
    }
    const __m256i above[2] = {_mm256_unpacklo_epi8(plane(Planes - 2), plane(Planes - 1)),
                              _mm256_unpackhi_epi8(plane(Planes - 2), plane(Planes - 1))};
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      rows.row[2 * i].part[part] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(below[i], above[i]));
      rows.row[2 * i + 1].part[part] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(below[i], above[i]));
    }
  }
  return rows;
}

// Row `row` of a line, each value from a table in memory.
GRAPHOPT_FORCE_INLINE Floats gather(const float* table, const Bytes& codes, size_t row) {
  return by_parts<Floats>([&](size_t part) __attribute__((always_inline)) {
    const __m256i code = _mm256_srli_epi32(reinterpret_cast<__m256i>(codes.part[part]), 8 * static_cast<int>(row));
    return _mm256_i32gather_ps(table, _mm256_and_si256(code, _mm256_set1_epi32(255)), sizeof(float));
  });
}

}  // namespace
}  // namespace graphopt

#include "matmul_table/cpu/register_decoders.h"
