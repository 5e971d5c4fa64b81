// Decoders that make floats in registers: of integers by conversion, of other tables byte by byte or by gathering. A
// set of instructions includes them behind its transpose(), interleave() and gather().
#pragma once

#include "matmul_table/cpu/float_rows.h"

namespace graphopt {
namespace {

// What x becomes that is rounded to bfloat16: it is multiplied as float, too.
constexpr Words kBfloat16Words = Words::kFloats;

// Tables of integers that fit a byte, signed or not.
template <int Bits, bool ByXor, bool Signed>
class FloatsOfIntegers {
 public:
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact, kIntegers = true;

  FloatsOfIntegers(const Table& table, Activations) : to_byte_(shifted(table.low)), unit_(table.step) {}
  float unit() const { return unit_; }

  GRAPHOPT_FORCE_INLINE Rows operator()(const Bytes& codes) const {
    return rows_of_bytes<Signed>(to_byte_(codes));
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
      look_ups_[i] = LookUp<kLookedUp>(halves ? table.bfloat16s[i] : table.floats[4 - Planes + i], 0);
    }
  }
  float unit() const { return 1; }

  GRAPHOPT_FORCE_INLINE Rows operator()(const Bytes& codes) const {
    const Bytes columns = transpose(codes);
    Bytes planes[Planes];
#pragma GCC unroll 4
    for (size_t i = 0; i < Planes; ++i) {
      planes[i] = look_ups_[i](Signed ? masked(columns, (1 << kLookedUp) - 1) : columns);
    }
    if constexpr (Signed) {
      planes[Planes - 1] = either(planes[Planes - 1], masked(shift_right<Bits - 8>(columns), 0x80));
    }
    return interleave(planes);
  }

 private:
  LookUp<kLookedUp> look_ups_[Planes];
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

  GRAPHOPT_FORCE_INLINE Rows operator()(const Bytes& codes) const {
    Rows rows;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) rows.row[i] = gather(table_, codes, i);
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

}  // namespace
}  // namespace graphopt
