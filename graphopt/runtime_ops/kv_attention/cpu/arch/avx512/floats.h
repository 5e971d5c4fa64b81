#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr size_t kMostTogether = 8, kSumLines = 16;
constexpr size_t kFloatRowsInOrder = 4;  // memory limits these, and is fastest when read line by line, in its order

inline Floats larger(const Floats& a, const Floats& b) { return {{_mm512_max_ps(a.part[0], b.part[0])}}; }
inline Floats smaller(const Floats& a, const Floats& b) { return {{_mm512_min_ps(a.part[0], b.part[0])}}; }

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return multiply_add(a, b, c); }

inline float sum_of(const Floats& a) { return _mm512_reduce_add_ps(a.part[0]); }

inline Floats sums_of(const Floats (&of)[kColumns]) {
  // Halves of two vectors are added at a time, so numbers end where their indices' bits are reversed in pairs.
  const auto at = [&](size_t i) __attribute__((always_inline)) {
    return of[(i & 4) << 1 | (i & 8) >> 1 | (i & 1) << 1 | (i & 2) >> 1].part[0];
  };
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) {
    const __m512 a = at(i), b = at(i + 8);
    eight[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    const __m512 a = eight[i], b = eight[i + 4];
    four[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    const __m512 a = four[i], b = four[i + 2];
    two[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  return {{_mm512_shuffle_ps(two[0], two[1], 0x88) + _mm512_shuffle_ps(two[0], two[1], 0xdd)}};
}

inline float largest_lane(const Floats& a) { return _mm512_reduce_max_ps(a.part[0]); }

inline uint32_t lanes_at_least(const Integers& ranks, int32_t least) {
  const __mmask16 mask =
      _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(ranks.part[0]), _mm512_set1_epi32(least));
  // GCC 12 may write the 16 bits of a mask to memory and read 32.
  uint32_t bits;
  asm("kmovw %1, %0" : "=r"(bits) : "k"(mask));
  return bits;
}

GRAPHOPT_FORCE_INLINE void transpose_block(const float* from, size_t size, float* block) {
  __m512 row[kColumns], next[kColumns];
#pragma GCC unroll 16
  for (size_t t = 0; t < 16; ++t) row[t] = _mm512_loadu_ps(from + t * size);
  // rows that are 8, 4, 2 and 1 apart change halves
  const auto halves = [&](__m512* out, const __m512* in, size_t distance, __m512i low, __m512i high)
      __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (size_t t = 0; t < 16; ++t) {
      if (t & distance) continue;
      out[t] = _mm512_permutex2var_ps(in[t], low, in[t + distance]);
      out[t + distance] = _mm512_permutex2var_ps(in[t], high, in[t + distance]);
    }
  };
  const auto index = [](int distance, bool upper) __attribute__((always_inline)) {
    alignas(64) int lanes[16];
    for (int j = 0; j < 16; ++j) {
      const int from_second = j & distance, lane = upper ? j | distance : j & ~distance;
      lanes[j] = (from_second ? 16 : 0) + (upper ? lane : from_second ? j & ~distance : j);
    }
    return _mm512_load_si512(lanes);
  };
  halves(next, row, 8, index(8, false), index(8, true));
  halves(row, next, 4, index(4, false), index(4, true));
  halves(next, row, 2, index(2, false), index(2, true));
  halves(row, next, 1, index(1, false), index(1, true));
#pragma GCC unroll 16
  for (size_t t = 0; t < 16; ++t) _mm512_store_ps(block + t * kColumns, row[t]);
}

}  // namespace
}  // namespace graphopt
