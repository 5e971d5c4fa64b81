#pragma once

#include "matmul_table/cpu/unpack.h"

namespace graphopt {
namespace {

// Of so many bits a table is one register, and looking up costs no more than the exclusive or.
constexpr int kLookUpBits = 4;

// A table of 2^Bits bytes, which is repeated up to 64 bytes. `flip` is exclusive-ored into each byte.
//
// As many as 64 bytes are looked up at a time; beyond them the result is 0, or what it was.
template <int Bits>
class LookUp {
 public:
  // Whether bits above those of the code must be 0.
  static constexpr bool kExact = Bits < 8;

  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t flip) {
    for (size_t i = 0; i < kRows; ++i) rows_[i] = veorq_u8(vld1q_u8(table + 16 * i), vdupq_n_u8(flip));
  }

  GRAPHOPT_FORCE_INLINE Bytes operator()(const Bytes& codes) const {
    return by_parts<Bytes>([&](size_t i) __attribute__((always_inline)) {
      const uint8x16_t code = reinterpret_cast<uint8x16_t>(codes.part[i]);
      uint8x16_t bytes;
      if constexpr (kRows == 1) {
        bytes = vqtbl1q_u8(rows_[0], code);
      } else if constexpr (kRows == 2) {
        bytes = vqtbl2q_u8({{rows_[0], rows_[1]}}, code);
      } else {
        bytes = vqtbl4q_u8(four(0), code);
#pragma GCC unroll 4
        for (size_t row = 4; row < kRows; row += 4) {
          const uint8x16_t beyond = vsubq_u8(code, vdupq_n_u8(static_cast<uint8_t>(16 * row)));
          bytes = vqtbx4q_u8(bytes, four(row), beyond);
        }
      }
      return reinterpret_cast<Bytes::Part>(bytes);
    });
  }

 private:
  static constexpr size_t kRows = Bits > 4 ? 1 << (Bits - 4) : 1;

  GRAPHOPT_FORCE_INLINE uint8x16x4_t four(size_t row) const {
    return {{rows_[row], rows_[row + 1], rows_[row + 2], rows_[row + 3]}};
  }

  uint8x16_t rows_[kRows];
};

// What the lanes `Count` columns to the right hold, in a circle; `line` is in memory, too, if `at` says where.
template <int Count>
GRAPHOPT_FORCE_INLINE Bytes rotate_columns(const Bytes& line, const uint8_t*) {
  return by_parts<Bytes>([&](size_t i) __attribute__((always_inline)) {
    const auto part = [&](size_t k) { return reinterpret_cast<uint8x16_t>(line.part[k % kParts]); };
    return reinterpret_cast<Bytes::Part>(vextq_u8(part(i), part(i + 1), 4 * Count));
  });
}

}  // namespace
}  // namespace graphopt
