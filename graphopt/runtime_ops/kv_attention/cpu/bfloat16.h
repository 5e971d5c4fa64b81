// bfloat16: rounded from floats, and loaded as floats.
#pragma once

#include "kv_attention/shared/layout.h"
#include "arch/vector.h"

namespace graphopt {

struct BFloat16 {
  uint16_t bits;
};

namespace {

// Rounds to the nearest, ties to even. Written so that compilers vectorize it.
inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest)};
}

inline Floats load_numbers(const BFloat16* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))}};
#elif defined(__AVX2__)
  const auto part = [&](size_t i) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  };
  return {{part(0), part(1)}};
#elif GRAPHOPT_NEON
  return by_parts<Floats>([&](size_t i) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * i);
    return reinterpret_cast<Floats::Part>(vshll_n_u16(halves, 16));
  });
#else
  uint32_t numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) numbers[i] = static_cast<uint32_t>(from[i].bits) << 16;
  return load_line<Floats>(numbers);
#endif
}

inline void put_one(float x, BFloat16* to) { *to = to_bfloat16(x); }

}  // namespace
}  // namespace graphopt
