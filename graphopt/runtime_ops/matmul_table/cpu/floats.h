// Codes to floats: the four rows of a line, each of 16 columns.
//
// A decoder's values are multiples of `unit()`, which is a power of two: value of the table = decoded * unit.
#pragma once

#include "matmul_table/cpu/lookup.h"
#include "matmul_table/cpu/scaled.h"

namespace graphopt {
namespace {

struct Rows {
  Floats row[4];
};

// Takes zero points off each value, or adds minimums: a sum of floats would lose what is taken off afterwards.
GRAPHOPT_UNCALLED Floats shifted(const Floats& decoded, float unit, const ColumnScales& of) {
  if (of.minimums) return decoded * unit * of.scale + of.zero_point;
  return decoded * unit - of.zero_point;
}

// What is left to be done to a sum of such values.
inline ColumnScales after_shift(ColumnScales of) {
  if (of.minimums) of.scale = all_lanes(1.0f);
  of.with_zero_point = of.minimums = false;
  return of;
}

// Byte k of each value: `repeat` copies each code to all bytes of its value, and byte k is looked up in table k.
//
// Line `part` of the result holds rows part * 4 / Size .. of 4 / Size rows each.
template <int Bits, size_t Size>
GRAPHOPT_UNCALLED Bytes values_of(const uint8_t (*tables)[256], const Bytes& codes, size_t part) {
  constexpr size_t kRows = 4 / Size;
#if defined(__AVX512VBMI__)
  uint8_t pattern[16];
  for (size_t i = 0; i < 16; ++i) pattern[i] = static_cast<uint8_t>(i / 4 * 4 + part * kRows + i % 4 / Size);
  const __m512i repeat = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern)));
  const __m512i index = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(codes.part[0]), repeat);
  const Bytes repeated = {{reinterpret_cast<Bytes::Part>(index)}};
  const auto byte = [&](size_t k) { return reinterpret_cast<__m512i>(LookUp<Bits>(tables[k])(repeated).part[0]); };
  __m512i found = byte(0);
#pragma GCC unroll 4
  for (size_t k = 1; k < Size; ++k) {
    const __mmask64 here = (Size == 2 ? 0x5555555555555555u : 0x1111111111111111u) << k;
    found = _mm512_mask_mov_epi8(found, here, byte(k));
  }
  return {{reinterpret_cast<Bytes::Part>(found)}};
#else
  uint8_t from[kLine], to[kLine];
  store_line(from, codes);
  for (size_t i = 0; i < kLine; ++i) to[i] = tables[i % Size][from[i / 4 * 4 + part * kRows + i % 4 / Size]];
  return load_line<Bytes>(to);
#endif
}

#if GRAPHOPT_DECODES_FLOATS

// Tables of integers that fit a byte, signed or not: the byte of each row goes to the end of its lane.
template <int Bits, bool ByXor, bool Signed>
class FloatsOfIntegers {
 public:
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact, kIntegers = true;

  FloatsOfIntegers(const Table& table, Activations) : to_byte_(shifted(table.low)), unit_(table.step) {}
  float unit() const { return unit_; }

  GRAPHOPT_UNCALLED Rows operator()(const Bytes& codes) const {
    typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
    typedef uint32_t Naturals __attribute__((vector_size(kVectorBytes)));
    using Lanes = std::conditional_t<Signed, Ints, Naturals>;
    const Bytes bytes = to_byte_(codes);
    Rows rows;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows.row[i] = by_parts<Floats>([&](size_t part) {
        const auto lanes = reinterpret_cast<Lanes>(reinterpret_cast<Naturals>(bytes.part[part]) << (24 - 8 * i)) >> 24;
        return __builtin_convertvector(reinterpret_cast<Ints>(lanes), Floats::Part);
      });
    }
    return rows;
  }

 private:
  // The table with its offset taken off.
  static IntegerPlane shifted(const IntegerPlane& from) {
    IntegerPlane plane = from;
    for (uint8_t& entry : plane.table) entry = static_cast<uint8_t>(entry - from.offset);
    plane.mask = plane.table[0];
    return plane;
  }

  ToByte<Bits, ByXor> to_byte_;
  float unit_;
};

// Any table, a byte of each float at a time; two of them where all floats are bfloat16. `Signed`: half of the table is
// looked up, where the uppermost bit of a code is the sign.
template <int Bits, size_t Planes, bool Signed = false>
class FloatsOfBytes {
  static constexpr int kLookedUp = Signed ? Bits - 1 : Bits;

 public:
  static constexpr bool kExact = LookUp<Bits>::kExact, kIntegers = false;

  FloatsOfBytes(const Table& table, Activations kind) {
    const bool halves = kind == Activations::kBfloat16;
    for (size_t i = 0; i < Planes; ++i) {
      planes_[i] = LookUp<kLookedUp>(halves ? table.bfloat16s[i] : table.floats[4 - Planes + i]);
    }
  }
  float unit() const { return 1; }

  GRAPHOPT_UNCALLED Rows operator()(const Bytes& codes) const {
    // the bytes of a row side by side: they are [column][row], 4 by 4
#if GRAPHOPT_NEON
    const uint8x16_t turn = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const Bytes turned = by_parts<Bytes>([&](size_t part) {
      return reinterpret_cast<Bytes::Part>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(codes.part[part]), turn));
    });
#else
    const __m256i turn = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const Bytes turned = by_parts<Bytes>([&](size_t part) {
      return reinterpret_cast<Bytes::Part>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(codes.part[part]), turn));
    });
#endif
    Bytes found[Planes];
#pragma GCC unroll 4
    for (size_t i = 0; i < Planes; ++i) {
      found[i] = planes_[i](Signed ? masked(turned, (1 << kLookedUp) - 1) : turned);
    }
    if constexpr (Signed) found[Planes - 1] = either(found[Planes - 1], masked(shift_right<Bits - 8>(turned), 0x80));
    Rows rows;
#pragma GCC unroll 4
    for (size_t part = 0; part < kParts; ++part) {
#if GRAPHOPT_NEON
      const auto plane = [&](size_t i) { return reinterpret_cast<uint8x16_t>(found[i].part[part]); };
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
#else
      const auto plane = [&](size_t i) { return reinterpret_cast<__m256i>(found[i].part[part]); };
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
#endif
    }
    return rows;
  }

 private:
  LookUp<kLookedUp> planes_[Planes];
};

// Any table of so many entries that looking up bytes takes longer than to gather floats.
template <int Bits>
class GatheredFloats {
 public:
  static constexpr bool kExact = Bits < 8, kIntegers = false;

  GatheredFloats(const Table& table, Activations kind) {
    const bool halves = kind == Activations::kBfloat16;
    for (size_t i = 0; i < size_t{1} << Bits; ++i) {
      uint32_t bits = 0;
      for (size_t k = 0; k < (halves ? 2 : 4); ++k) {
        bits |= halves ? uint32_t{table.bfloat16s[k][i]} << (16 + 8 * k) : uint32_t{table.floats[k][i]} << 8 * k;
      }
      table_[i] = bits_of<float>(bits);
    }
  }
  float unit() const { return 1; }

  GRAPHOPT_UNCALLED Rows operator()(const Bytes& codes) const {
    Rows rows;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows.row[i] = by_parts<Floats>([&](size_t part) __attribute__((always_inline)) {
#if GRAPHOPT_NEON
        Floats::Part found;
        for (size_t lane = 0; lane < 4; ++lane) found[lane] = table_[codes.part[part][4 * lane + static_cast<size_t>(i)]];
        return found;
#else
        const __m256i code = _mm256_srli_epi32(reinterpret_cast<__m256i>(codes.part[part]), 8 * i);
        return _mm256_i32gather_ps(table_, _mm256_and_si256(code, _mm256_set1_epi32(255)), sizeof(float));
#endif
      });
    }
    return rows;
  }

 private:
  float table_[1 << Bits];
};

// Calls with_decoder(decoder) with the fastest for these weights.
template <int Bits, typename WithDecoder>
void choose_decoder(const Table& table, Activations kind, const WithDecoder& with_decoder) {
  if (table.holds_signed_bytes) {
    // exclusive or gives the integer itself where the offset is half of what a byte holds
    if constexpr (Bits == 8) {
      if (table.by_xor && table.low.offset == 128) return with_decoder(FloatsOfIntegers<8, true, true>(table, kind));
    }
    return with_decoder(FloatsOfIntegers<Bits, false, true>(table, kind));
  }
  if constexpr (Bits == 8) {
    if (table.by_xor && table.holds_unsigned_bytes) {
      return with_decoder(FloatsOfIntegers<8, true, false>(table, kind));
    }
  }
  if (kind == Activations::kBfloat16 || table.holds_bfloat16s) {
    if constexpr (Bits == 6 || Bits == 8) {
      if (table.floats_have_signs) return with_decoder(FloatsOfBytes<Bits, 2, true>(table, kind));
    }
    if constexpr (Bits <= 6) return with_decoder(FloatsOfBytes<Bits, 2>(table, kind));
  }
  if constexpr (Bits <= 6) {
    with_decoder(FloatsOfBytes<Bits, 4>(table, kind));
  } else {
    with_decoder(GatheredFloats<Bits>(table, kind));
  }
}

#else

template <int Bits>
class FloatsOfTable {
 public:
  static constexpr bool kExact = LookUp<Bits>::kExact, kIntegers = false;

  explicit FloatsOfTable(const Table& table) : table_(table) {}
  float unit() const { return 1; }

  GRAPHOPT_UNCALLED Rows operator()(const Bytes& codes) const {
    Rows rows;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const Bytes bytes = values_of<Bits, 4>(table_.floats, codes, i);
      const auto part = [&](size_t k) { return reinterpret_cast<Floats::Part>(bytes.part[k]); };
      rows.row[i] = by_parts<Floats>(part);
    }
    return rows;
  }

 private:
  const Table& table_;
};

template <int Bits, typename WithDecoder>
void choose_decoder(const Table& table, Activations, const WithDecoder& with_decoder) {
  with_decoder(FloatsOfTable<Bits>(table));
}

#endif

}  // namespace
}  // namespace graphopt
