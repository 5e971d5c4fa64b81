#pragma once

#include "matmul_table/cpu/unpack.h"

namespace graphopt {
namespace {

// Of so many bits a table is one register, and looking up costs no more than the exclusive or.
constexpr int kLookUpBits = 0;

// A table of 2^Bits bytes, which is repeated up to 64 bytes.
template <int Bits>
class LookUp {
 public:
  // Whether bits above those of the code must be 0.
  static constexpr bool kExact = Bits < 8;

  LookUp() = default;
  explicit LookUp(const uint8_t* table, uint8_t /* 0: products take unsigned bytes */) : table_(table) {}

  GRAPHOPT_FORCE_INLINE Bytes operator()(const Bytes& codes) const {
    uint8_t bytes[kLine];
    store_line(bytes, codes);
    for (size_t i = 0; i < kLine; ++i) bytes[i] = table_[bytes[i]];
    return load_line<Bytes>(bytes);
  }

 private:
  const uint8_t* table_ = nullptr;
};

// What the lanes `Count` columns to the right hold, in a circle; `line` is in memory, too, if `at` says where.
template <int Count>
GRAPHOPT_FORCE_INLINE Bytes rotate_columns(const Bytes& line, const uint8_t*) {
  uint8_t twice[2 * kLine];
  store_line(twice, line);
  store_line(twice + kLine, line);
  return load_line<Bytes>(twice + 4 * Count);
}

}  // namespace
}  // namespace graphopt
