#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr size_t kMostTogether = 4, kSumLines = 4;
constexpr size_t kFloatRowsInOrder = 0;

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return multiply_add(a, b, c); }

template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  const __m256 half = reinterpret_cast<__m256>(join(a.part[0], a.part[1]));
  typedef float Four __attribute__((vector_size(16)));
  const auto four = [](__m128 x) { return reinterpret_cast<Four>(x); };
  const Four quarter = join(four(_mm256_castps256_ps128(half)), four(_mm256_extractf128_ps(half, 1)));
  const __m128 two = reinterpret_cast<__m128>(join(quarter, four(_mm_movehl_ps(quarter, quarter))));
  return join(four(two), four(_mm_movehdup_ps(two)))[0];
}

// Quarters of 8 by 8: halves of rows that are 4 apart are loaded side by side, rows that are 2 and 1 apart change numbers.
GRAPHOPT_FORCE_INLINE void transpose_block(const float* from, size_t size, float* block) {
  for (size_t quarter = 0; quarter < 4; ++quarter) {
    const float* const rows = from + quarter / 2 * 8 * size + quarter % 2 * 8;
    float* const to = block + quarter % 2 * 8 * kColumns + quarter / 2 * 8;
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const auto load = [&](size_t t) __attribute__((always_inline)) {
        const float* const row = rows + t * size + half * 4;
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * size), 1);
      };
      const __m256 a = load(0), b = load(1), c = load(2), d = load(3);
      const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
      const __m256 other_low = _mm256_unpacklo_ps(c, d), other_high = _mm256_unpackhi_ps(c, d);
      float* const columns = to + half * 4 * kColumns;
      _mm256_storeu_ps(columns, _mm256_shuffle_ps(low, other_low, 0x44));
      _mm256_storeu_ps(columns + kColumns, _mm256_shuffle_ps(low, other_low, 0xee));
      _mm256_storeu_ps(columns + 2 * kColumns, _mm256_shuffle_ps(high, other_high, 0x44));
      _mm256_storeu_ps(columns + 3 * kColumns, _mm256_shuffle_ps(high, other_high, 0xee));
    }
  }
}

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/arch/generic/floats.h"
