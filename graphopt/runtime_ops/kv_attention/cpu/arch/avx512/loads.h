#pragma once

#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/float8.h"

namespace graphopt {
namespace {

inline Floats load_numbers(const BFloat16* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))}};
}

inline Floats load_numbers(const Float8* from) {
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
}

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
inline void load_numbers(const Float8* from, size_t n, Floats (&numbers)[4]) {
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const __m512i codes = _mm512_permutexvar_epi8(table(kFloat8Places.place), _mm512_loadu_si512(from + n));
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

inline Integers load_bytes(const void* from) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {{reinterpret_cast<Integers::Part>(_mm512_cvtepu8_epi32(bytes))}};
}

}  // namespace
}  // namespace graphopt
