// Decodes packed weights: planes of bits to codes, codes to bytes of the table's values.
#pragma once

#include "matmul_table/cpu/vector.h"
#include "matmul_table/shared/weights.h"

namespace graphopt {
namespace {

constexpr size_t kUnitLines = 4;  // 256 codes: 16 rows of 16 columns

// Shifts 16 bits at a time: bits move from one byte into the next, where they are masked off or never looked at.
template <int By>
inline Bytes shift_right(const Bytes& bytes) {
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  return by_parts<Bytes>([&](size_t i) {
    const Pairs pairs = reinterpret_cast<Pairs>(bytes.part[i]);
    return reinterpret_cast<Bytes::Part>(By >= 0 ? pairs >> (By >= 0 ? By : 0) : pairs << (By < 0 ? -By : 0));
  });
}

inline Bytes select(const Bytes& a, const Bytes& b, uint8_t from_a) {
  return by_parts<Bytes>([&](size_t i) {
    const Bytes::Part mask = Bytes::Part{} + from_a;
    return (a.part[i] & mask) | (b.part[i] & ~mask);
  });
}

inline Bytes masked(const Bytes& a, uint8_t mask) {
  return by_parts<Bytes>([&](size_t i) { return a.part[i] & (Bytes::Part{} + mask); });
}

// Sets bit `At` of each byte of line j where the plane of one bit has a 1; the bit was 0.
template <int At, size_t J>
inline Bytes with_single_bit(const Bytes& line, const uint8_t* plane) {
#if defined(__AVX512BW__)
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  const __m512i lower = _mm512_set1_epi8(1 << 2 * J), upper = _mm512_set1_epi8(static_cast<char>(2 << 2 * J));
  const __mmask64 set = _mm512_test_epi8_mask(twice, _mm512_mask_blend_epi8(~uint64_t{0} << 32, lower, upper));
  const __m512i bits = _mm512_maskz_set1_epi8(set, static_cast<char>(1 << At));
  return {{reinterpret_cast<Bytes::Part>(_mm512_or_si512(reinterpret_cast<__m512i>(line.part[0]), bits))}};
#else
  return by_parts<Bytes>([&](size_t i) {
    const size_t position = J * kLine + i * kVectorBytes, h = position / 32;
    Bytes::Part part;
    __builtin_memcpy(&part, plane + position % 32, sizeof part);
    return line.part[i] | (part >> static_cast<uint8_t>(h) & 1) << At;
  });
#endif
}

// Whether a table of this many bits can be indexed by bytes with arbitrary bits above the code.
constexpr bool ignores_upper_bits(int bits) {
#if defined(__AVX512VBMI__)
  return bits <= 6;
#else
  return bits == 8;
#endif
}

// The codes of a unit, line j holding those of 4 rows; with Exact the bits above the code are 0.
template <int Bits, bool Exact, size_t J>
inline Bytes codes_of_line(const uint8_t* unit) {
  constexpr int in4 = Bits & 4, in2 = Bits & 2, in1 = Bits & 1;
  if constexpr (Bits == 8) return load_line<Bytes>(unit + J * kLine);
  Bytes codes = {};
  int bits = 0;
  (void)bits;
  if constexpr (in4) codes = shift_right<J % 2 ? 4 : 0>(load_line<Bytes>(unit + J / 2 * kLine));
  if constexpr (in2) {
    constexpr int shift = 2 * static_cast<int>(J) - in4;
    const Bytes twos = shift_right<shift>(load_line<Bytes>(unit + 32 * in4));
    if constexpr (in4) {
      codes = select(codes, twos, 0x0f);
    } else {
      codes = twos;
    }
  }
  if constexpr (in1 || Exact) codes = masked(codes, (1 << (Bits & 6)) - 1);
  if constexpr (in1) codes = with_single_bit<Bits - 1, J>(codes, unit + 32 * (Bits - 1));
  return codes;
}

// Looks 64 codes up in a table of 2^Bits bytes, which is repeated up to 64 bytes.
template <int Bits>
inline Bytes look_up(const uint8_t* table, const Bytes& codes) {
#if defined(__AVX512VBMI__)
  const __m512i index = reinterpret_cast<__m512i>(codes.part[0]);
  const auto row = [&](size_t i) { return _mm512_loadu_si512(table + i * kLine); };
  __m512i found;
  if constexpr (Bits <= 6) {
    found = _mm512_permutexvar_epi8(index, row(0));
  } else {
    found = _mm512_permutex2var_epi8(row(0), index, row(1));
    if constexpr (Bits == 8) {
      const __m512i upper = _mm512_permutex2var_epi8(row(2), index, row(3));
      found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), found, upper);
    }
  }
  return {{reinterpret_cast<Bytes::Part>(found)}};
#elif defined(__AVX2__)
  return by_parts<Bytes>([&](size_t i) {
    const __m256i index = reinterpret_cast<__m256i>(codes.part[i]);
    const __m256i low = _mm256_and_si256(index, _mm256_set1_epi8(15));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(index, 4), _mm256_set1_epi8(15));
    const auto row = [&](int which) {
      return _mm256_shuffle_epi8(
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + which)), low);
    };
    __m256i found = row(0);
    for (int which = 1; which < (Bits > 4 ? 1 << (Bits - 4) : 1); ++which) {
      const __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8(static_cast<char>(which)));
      found = _mm256_blendv_epi8(found, row(which), here);
    }
    return reinterpret_cast<Bytes::Part>(found);
  });
#else
  uint8_t bytes[kLine];
  store_line(bytes, codes);
  for (size_t i = 0; i < kLine; ++i) bytes[i] = table[bytes[i]];
  return load_line<Bytes>(bytes);
#endif
}

// Calls with_line(j) for each line of a unit, j known to the compiler.
template <typename WithLine>
inline void for_each_line(const WithLine& with_line) {
  with_line(std::integral_constant<size_t, 0>());
  with_line(std::integral_constant<size_t, 1>());
  with_line(std::integral_constant<size_t, 2>());
  with_line(std::integral_constant<size_t, 3>());
}

// How a code becomes the unsigned byte that an integer product multiplies: by exclusive or where the table is that of
// an integer format, else by the table.
template <int Bits, bool ByXor>
inline Bytes integers_of(const IntegerPlane& plane, const Bytes& codes) {
  if constexpr (ByXor) {
    return by_parts<Bytes>([&](size_t i) { return codes.part[i] ^ (Bytes::Part{} + plane.mask); });
  } else {
    return look_up<Bits>(plane.table, codes);
  }
}

// Byte k of each value: `repeat` copies each code to all bytes of its value, and byte k is looked up in table k.
//
// Line `part` of the result holds rows part * 4 / Size .. of 4 / Size rows each.
template <int Bits, size_t Size>
inline Bytes values_of(const uint8_t (*tables)[256], const Bytes& codes, size_t part) {
  constexpr size_t kRows = 4 / Size;
#if defined(__AVX512VBMI__)
  uint8_t pattern[16];
  for (size_t i = 0; i < 16; ++i) pattern[i] = static_cast<uint8_t>(i / 4 * 4 + part * kRows + i % 4 / Size);
  const __m512i repeat = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern)));
  const __m512i index = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(codes.part[0]), repeat);
  const Bytes repeated = {{reinterpret_cast<Bytes::Part>(index)}};
  __m512i found = reinterpret_cast<__m512i>(look_up<Bits>(tables[0], repeated).part[0]);
#pragma GCC unroll 4
  for (size_t k = 1; k < Size; ++k) {
    const __mmask64 here = (Size == 2 ? 0x5555555555555555u : 0x1111111111111111u) << k;
    found = _mm512_mask_mov_epi8(found, here, reinterpret_cast<__m512i>(look_up<Bits>(tables[k], repeated).part[0]));
  }
  return {{reinterpret_cast<Bytes::Part>(found)}};
#else
  uint8_t from[kLine], to[kLine];
  store_line(from, codes);
  for (size_t i = 0; i < kLine; ++i) to[i] = tables[i % Size][from[i / 4 * 4 + part * kRows + i % 4 / Size]];
  return load_line<Bytes>(to);
#endif
}

}  // namespace
}  // namespace graphopt
