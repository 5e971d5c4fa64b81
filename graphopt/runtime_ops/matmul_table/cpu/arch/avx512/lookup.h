#pragma once

#include "matmul_table/cpu/unpack.h"

namespace graphopt {
namespace {

// Of so many bits a table is one register, and looking up costs no more than the exclusive or.
constexpr int kLookUpBits = 6;

// A table of 2^Bits bytes, which is repeated up to 64 bytes. It stays in memory: one load brings 64 bytes.
template <int Bits>
class LookUp {
 public:
  // Whether bits above those of the code must be 0.
  static constexpr bool kExact = Bits > 6 && Bits < 8;

  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t /* 0: products take unsigned bytes */) : table_(table) {}

  GRAPHOPT_FORCE_INLINE Bytes operator()(const Bytes& codes) const {
    const __m512i index = reinterpret_cast<__m512i>(codes.part[0]);
    const auto row = [&](size_t i) { return _mm512_loadu_si512(table_ + i * kLine); };
    __m512i bytes;
    if constexpr (Bits <= 6) {
      bytes = _mm512_permutexvar_epi8(index, row(0));
    } else {
      bytes = _mm512_permutex2var_epi8(row(0), index, row(1));
      if constexpr (Bits == 8) {
        const __m512i upper = _mm512_permutex2var_epi8(row(2), index, row(3));
        bytes = _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), bytes, upper);
      }
    }
    return {{reinterpret_cast<Bytes::Part>(bytes)}};
  }

 private:
  const uint8_t* table_ = nullptr;
};

// What the lanes `Count` columns to the right hold, in a circle; `line` is in memory, too, if `at` says where.
template <int Count>
GRAPHOPT_FORCE_INLINE Bytes rotate_columns(const Bytes& line, const uint8_t*) {
  const __m512i lanes = reinterpret_cast<__m512i>(line.part[0]);
  return {{reinterpret_cast<Bytes::Part>(_mm512_alignr_epi32(lanes, lanes, Count))}};
}

}  // namespace
}  // namespace graphopt
