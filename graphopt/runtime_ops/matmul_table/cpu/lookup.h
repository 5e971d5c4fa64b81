// Looks codes up in tables of bytes.
#pragma once

#include "matmul_table/cpu/decode.h"

namespace graphopt {
namespace {

// A table of 2^Bits bytes, which is repeated up to 64 bytes. `flip` is exclusive-ored into each byte.
//
// NEON looks up as many as 64 bytes at a time; beyond them the result is 0, or what it was.
//
// AVX2 looks up 16 bytes at a time, where the index has bit 7 set the result is 0. Row i of the table is stored as its
// difference to row i + 1, by exclusive or: adding 0x70 - 16 i to a code sets bit 7 where the code is beyond row i, so
// the exclusive or of all results is the entry of the code's own row. 8 bits are two halves of this.
template <int Bits>
class LookUp {
 public:
  // Whether bits above those of the code must be 0.
#if defined(__AVX512VBMI__)
  static constexpr bool kExact = Bits > 6 && Bits < 8;
#else
  static constexpr bool kExact = Bits < 8;
#endif

#if defined(__AVX2__) && !defined(__AVX512VBMI__)
  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t flip = 0) {
    const auto row = [&](int i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + i);
      return _mm256_broadcastsi128_si256(_mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(flip))));
    };
    for (int i = 0; i < kRows; ++i) {
      rows_[i] = (i + 1) % kHalf == 0 ? row(i) : _mm256_xor_si256(row(i), row(i + 1));
    }
  }

  GRAPHOPT_UNCALLED Bytes operator()(const Bytes& codes) const {
    if constexpr (Bits > 7) return called(codes);
    return found(codes);
  }

 private:
  // What has very many steps is no part of loops that are unrolled.
  __attribute__((noinline)) Bytes called(const Bytes& codes) const { return found(codes); }

  GRAPHOPT_UNCALLED Bytes found(const Bytes& codes) const {
    return by_parts<Bytes>([&](size_t i) __attribute__((always_inline)) {
      const __m256i code = reinterpret_cast<__m256i>(codes.part[i]);
      __m256i found = in_half(code, rows_);
      if constexpr (Bits == 8) {
        const __m256i upper = _mm256_xor_si256(code, _mm256_set1_epi8(static_cast<char>(0x80)));
        found = _mm256_xor_si256(found, in_half(upper, rows_ + kHalf));
      }
      return reinterpret_cast<Bytes::Part>(found);
    });
  }

  static constexpr int kRows = Bits > 4 ? 1 << (Bits - 4) : 1, kHalf = kRows < 8 ? kRows : 8;

  static GRAPHOPT_UNCALLED __m256i in_half(__m256i code, const __m256i* rows) {
    __m256i found = _mm256_shuffle_epi8(rows[kHalf - 1], code);
#pragma GCC unroll 8
    for (int i = 0; i < kHalf - 1; ++i) {
      const __m256i beyond = _mm256_adds_epu8(code, _mm256_set1_epi8(static_cast<char>(0x70 - 16 * i)));
      found = _mm256_xor_si256(found, _mm256_shuffle_epi8(rows[i], beyond));
    }
    return found;
  }

  __m256i rows_[kRows];
#elif GRAPHOPT_NEON
  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t flip = 0) {
    for (size_t i = 0; i < kRows; ++i) rows_[i] = veorq_u8(vld1q_u8(table + 16 * i), vdupq_n_u8(flip));
  }

  GRAPHOPT_UNCALLED Bytes operator()(const Bytes& codes) const {
    return by_parts<Bytes>([&](size_t i) __attribute__((always_inline)) {
      const uint8x16_t code = reinterpret_cast<uint8x16_t>(codes.part[i]);
      uint8x16_t found;
      if constexpr (kRows == 1) {
        found = vqtbl1q_u8(rows_[0], code);
      } else if constexpr (kRows == 2) {
        found = vqtbl2q_u8({{rows_[0], rows_[1]}}, code);
      } else {
        found = vqtbl4q_u8(four(0), code);
#pragma GCC unroll 4
        for (size_t row = 4; row < kRows; row += 4) {
          const uint8x16_t beyond = vsubq_u8(code, vdupq_n_u8(static_cast<uint8_t>(16 * row)));
          found = vqtbx4q_u8(found, four(row), beyond);
        }
      }
      return reinterpret_cast<Bytes::Part>(found);
    });
  }

 private:
  static constexpr size_t kRows = Bits > 4 ? 1 << (Bits - 4) : 1;

  GRAPHOPT_UNCALLED uint8x16x4_t four(size_t row) const {
    return {{rows_[row], rows_[row + 1], rows_[row + 2], rows_[row + 3]}};
  }

  uint8x16_t rows_[kRows];
#else
  LookUp() = default;
  explicit LookUp(const uint8_t* table) : table_(table) {}

  GRAPHOPT_UNCALLED Bytes operator()(const Bytes& codes) const {
#if defined(__AVX512VBMI__)
    const __m512i index = reinterpret_cast<__m512i>(codes.part[0]);
    const auto row = [&](size_t i) { return _mm512_loadu_si512(table_ + i * kLine); };
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
#else
    uint8_t bytes[kLine];
    store_line(bytes, codes);
    for (size_t i = 0; i < kLine; ++i) bytes[i] = table_[bytes[i]];
    return load_line<Bytes>(bytes);
#endif
  }

 private:
  const uint8_t* table_ = nullptr;
#endif
};

// How a code becomes the unsigned byte that an integer product multiplies: by exclusive or where the table is that of
// an integer format, else by the table.
template <int Bits, bool ByXor>
class ToByte {
 public:
  static constexpr bool kExact = ByXor ? Bits < 8 : LookUp<Bits>::kExact;

  explicit ToByte(const IntegerPlane& plane) : mask_(plane.mask) {
    if constexpr (!ByXor) look_up_ = LookUp<Bits>(plane.table);
  }
#if GRAPHOPT_NEON
  // A byte that `flip` is exclusive-ored into.
  ToByte(const IntegerPlane& plane, uint8_t flip) : mask_(plane.mask ^ flip) {
    if constexpr (!ByXor) look_up_ = LookUp<Bits>(plane.table, flip);
  }
#endif

  GRAPHOPT_UNCALLED Bytes operator()(const Bytes& codes) const {
    if constexpr (ByXor) {
      return by_parts<Bytes>([&](size_t i) { return codes.part[i] ^ (Bytes::Part{} + mask_); });
    } else {
      return look_up_(codes);
    }
  }

 private:
  uint8_t mask_;
  struct Nothing {};
  std::conditional_t<ByXor, Nothing, LookUp<Bits>> look_up_;
};

}  // namespace
}  // namespace graphopt
