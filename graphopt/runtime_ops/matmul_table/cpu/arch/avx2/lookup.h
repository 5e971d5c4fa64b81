#pragma once

#include "matmul_table/cpu/unpack.h"

namespace graphopt {
namespace {

// Of so many bits a table is one register, and looking up costs no more than the exclusive or.
constexpr int kLookUpBits = 4;

// A table of 2^Bits bytes, which is repeated up to 64 bytes. `flip` is exclusive-ored into each byte.
//
// 16 bytes are looked up at a time, where the index has bit 7 set the result is 0. Row i of the table is stored as its
// difference to row i + 1, by exclusive or: adding 0x70 - 16 i to a code sets bit 7 where the code is beyond row i, so
// the exclusive or of all results is the entry of the code's own row. 8 bits are two halves of this.
template <int Bits>
class LookUp {
 public:
  // Whether bits above those of the code must be 0.
  static constexpr bool kExact = Bits < 8;

  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t flip) {
    const auto row = [&](int i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + i);
      return _mm256_broadcastsi128_si256(_mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(flip))));
    };
    for (int i = 0; i < kRows; ++i) {
      rows_[i] = (i + 1) % kHalf == 0 ? row(i) : _mm256_xor_si256(row(i), row(i + 1));
    }
  }

  GRAPHOPT_FORCE_INLINE Bytes operator()(const Bytes& codes) const {
    if constexpr (Bits > 7) return in_call(codes);
    return bytes_of(codes);
  }

 private:
  // What has very many steps is no part of loops that are unrolled.
  __attribute__((noinline)) Bytes in_call(const Bytes& codes) const { return bytes_of(codes); }

  GRAPHOPT_FORCE_INLINE Bytes bytes_of(const Bytes& codes) const {
    return by_parts<Bytes>([&](size_t i) __attribute__((always_inline)) {
      const __m256i code = reinterpret_cast<__m256i>(codes.part[i]);
      __m256i bytes = in_half(code, rows_);
      if constexpr (Bits == 8) {
        const __m256i upper = _mm256_xor_si256(code, _mm256_set1_epi8(static_cast<char>(0x80)));
        bytes = _mm256_xor_si256(bytes, in_half(upper, rows_ + kHalf));
      }
      return reinterpret_cast<Bytes::Part>(bytes);
    });
  }

  static constexpr int kRows = Bits > 4 ? 1 << (Bits - 4) : 1, kHalf = kRows < 8 ? kRows : 8;

  static GRAPHOPT_FORCE_INLINE __m256i in_half(__m256i code, const __m256i* rows) {
    __m256i bytes = _mm256_shuffle_epi8(rows[kHalf - 1], code);
#pragma GCC unroll 8
    for (int i = 0; i < kHalf - 1; ++i) {
      const __m256i beyond = _mm256_adds_epu8(code, _mm256_set1_epi8(static_cast<char>(0x70 - 16 * i)));
      bytes = _mm256_xor_si256(bytes, _mm256_shuffle_epi8(rows[i], beyond));
    }
    return bytes;
  }

  __m256i rows_[kRows];
};

// What the lanes `Count` columns to the right hold, in a circle; `line` is in memory, too, if `at` says where: then half
// of it is a load.
template <int Count>
GRAPHOPT_FORCE_INLINE Bytes rotate_columns(const Bytes& line, const uint8_t* at) {
  const __m256i left = reinterpret_cast<__m256i>(line.part[0]), right = reinterpret_cast<__m256i>(line.part[1]);
  const __m256i outer = _mm256_permute2x128_si256(left, right, 3);
  __m256i first;
  if (at) {
    first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 4 * Count));
  } else {
    first = _mm256_alignr_epi8(_mm256_permute2x128_si256(left, right, 0x21), left, 4 * Count);
  }
  return {{reinterpret_cast<Bytes::Part>(first),
           reinterpret_cast<Bytes::Part>(_mm256_alignr_epi8(outer, right, 4 * Count))}};
}

}  // namespace
}  // namespace graphopt
