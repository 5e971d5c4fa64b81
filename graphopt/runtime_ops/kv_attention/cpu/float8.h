// float8 (E4M3FN): loaded as floats.
#pragma once

#include "kv_attention/shared/float8.h"
#include "arch/vector.h"

namespace graphopt {
namespace {

inline void put_one(float x, Float8* to) { *to = to_float8(x); }

// The bits of the float that a code without its sign means.
constexpr uint32_t float8_magnitude(uint32_t code) {
  if (code == 0x7f) return 0x7fc00000;
  if (code >= 8) return ((code >> 3) + 120) << 23 | (code & 7) << 20;
  if (code == 0) return 0;
  uint32_t shift = 1;
  while (code << shift < 8) ++shift;
  return (121 - shift) << 23 | (code << shift & 7) << 20;
}

// Bytes 3 and 2 of these bits; the others are 0.
struct Float8Bytes {
  uint8_t upper[128] = {}, lower[128] = {};

  constexpr Float8Bytes() {
    for (uint32_t code = 0; code < 128; ++code) {
      upper[code] = static_cast<uint8_t>(float8_magnitude(code) >> 24);
      lower[code] = static_cast<uint8_t>(float8_magnitude(code) >> 16);
    }
  }
};
alignas(kLine) constexpr Float8Bytes kFloat8;

inline Floats load_numbers(const Float8* from) {
#if defined(__AVX512VBMI__)
  // Each code goes to bytes 2 and 3 of its lane and is replaced there by the tables' entries for its low 7 bits.
  const __m512i places = _mm512_add_epi32(
      _mm512_set1_epi32(static_cast<int>(0x00008080)),
      _mm512_set_epi32(0x0f0f0000, 0x0e0e0000, 0x0d0d0000, 0x0c0c0000, 0x0b0b0000, 0x0a0a0000, 0x09090000, 0x08080000,
                       0x07070000, 0x06060000, 0x05050000, 0x04040000, 0x03030000, 0x02020000, 0x01010000, 0));
  const __m512i codes = _mm512_shuffle_epi8(
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), places);
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  constexpr __mmask64 kUpper = 0x8888888888888888, kLower = 0x4444444444444444;
  __m512i bits = _mm512_mask2_permutex2var_epi8(table(kFloat8.upper), codes, kUpper, table(kFloat8.upper + kLine));
  bits = _mm512_mask2_permutex2var_epi8(table(kFloat8.lower), bits, kLower, table(kFloat8.lower + kLine));
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
  return {{_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, codes, sign, 0xf8))}};  // bits | (codes & sign)
#elif defined(__F16C__)
  // Shifted to where a half has exponent and fraction, they are 2^8 too small; that also takes in subnormal numbers.
  const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
  const __m256i numbers = _mm256_or_si256(halves, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7)));
  const __m256 scale = _mm256_set1_ps(256);
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(numbers)) * scale,
           _mm256_cvtph_ps(_mm256_extracti128_si256(numbers, 1)) * scale}};
#elif GRAPHOPT_NEON
  // the same
  const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const uint8_t*>(from));
  return by_parts<Floats>([&](size_t i) __attribute__((always_inline)) {
    const int8x8_t eight = vreinterpret_s8_u8(i < 2 ? vget_low_u8(bytes) : vget_high_u8(bytes));
    const uint16x8_t codes = vreinterpretq_u16_s16(vmovl_s8(eight));
    const uint16x8_t halves = vandq_u16(vshlq_n_u16(codes, 7), vdupq_n_u16(0xbfff));
    const uint16x8_t magnitude = vandq_u16(halves, vdupq_n_u16(0x7fff));
    const uint16x8_t numbers = vorrq_u16(halves, vceqq_u16(magnitude, vdupq_n_u16(0x7f << 7)));
    const uint16x4_t four = i % 2 ? vget_high_u16(numbers) : vget_low_u16(numbers);
    return reinterpret_cast<Floats::Part>(vcvt_f32_f16(vreinterpret_f16_u16(four))) * 256;
  });
#else
  uint32_t numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) {
    const uint32_t code = from[i].bits & 0x7f;
    numbers[i] = static_cast<uint32_t>(kFloat8.upper[code] | (from[i].bits & 0x80)) << 24 |
                 static_cast<uint32_t>(kFloat8.lower[code]) << 16;
  }
  return load_line<Floats>(numbers);
#endif
}

#if defined(__AVX512VBMI__)
// Which byte of a line goes where, so that what is unpacked below comes out in order.
struct Float8Places {
  uint8_t place[kLine] = {};

  constexpr Float8Places() {
    for (size_t i = 0; i < kLine; ++i) {
      const size_t lane = i / 16, pair = i % 8 / 2, group = i % 16 / 8 * 2 + i % 2;
      place[i] = static_cast<uint8_t>(group * kColumns + lane * 4 + pair);
    }
  }
};
alignas(kLine) constexpr Float8Places kFloat8Places;

// 64 numbers, in half the steps that 4 times 16 take.
inline void load_line_of_float8(const Float8* from, Floats (&numbers)[4]) {
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const __m512i codes = _mm512_permutexvar_epi8(table(kFloat8Places.place), _mm512_loadu_si512(from));
  // the tables are indexed by the low 7 bits of each code
  const __m512i magnitude = _mm512_permutex2var_epi8(table(kFloat8.upper), codes, table(kFloat8.upper + kLine));
  const __m512i lower = _mm512_permutex2var_epi8(table(kFloat8.lower), codes, table(kFloat8.lower + kLine));
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i upper = _mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8);  // magnitude | (codes & sign)
  // pairs of what is now the upper half of a float, two of them in each lane
  const __m512i pairs[] = {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    numbers[2 * i] = {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16))}};
    numbers[2 * i + 1] = {{_mm512_castsi512_ps(_mm512_and_si512(pairs[i], high))}};
  }
}
#endif

}  // namespace
}  // namespace graphopt
