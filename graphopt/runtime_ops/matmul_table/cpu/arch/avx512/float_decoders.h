#pragma once

#include "matmul_table/cpu/float_rows.h"

namespace graphopt {
namespace {

// Byte k of each value: `repeat` copies each code to all bytes of its value, and byte k is looked up in table k.
//
// Line `part` of the result holds rows part * 4 / Size .. of 4 / Size rows each.
template <int Bits, size_t Size>
GRAPHOPT_FORCE_INLINE Bytes values_of(const uint8_t (*tables)[256], const Bytes& codes, size_t part) {
  constexpr size_t kRows = 4 / Size;
  uint8_t pattern[16];
  for (size_t i = 0; i < 16; ++i) pattern[i] = static_cast<uint8_t>(i / 4 * 4 + part * kRows + i % 4 / Size);
  const __m512i repeat = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern)));
  const __m512i index = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(codes.part[0]), repeat);
  const Bytes repeated = {{reinterpret_cast<Bytes::Part>(index)}};
  const auto byte = [&](size_t k) { return reinterpret_cast<__m512i>(LookUp<Bits>(tables[k], 0)(repeated).part[0]); };
  __m512i bytes = byte(0);
#pragma GCC unroll 4
  for (size_t k = 1; k < Size; ++k) {
    const __mmask64 of_byte = (Size == 2 ? 0x5555555555555555u : 0x1111111111111111u) << k;
    bytes = _mm512_mask_mov_epi8(bytes, of_byte, byte(k));
  }
  return {{reinterpret_cast<Bytes::Part>(bytes)}};
}

}  // namespace
}  // namespace graphopt

#include "matmul_table/cpu/table_decoder.h"
