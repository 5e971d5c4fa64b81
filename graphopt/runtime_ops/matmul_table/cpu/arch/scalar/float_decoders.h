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
  uint8_t from[kLine], to[kLine];
  store_line(from, codes);
  for (size_t i = 0; i < kLine; ++i) to[i] = tables[i % Size][from[i / 4 * 4 + part * kRows + i % 4 / Size]];
  return load_line<Bytes>(to);
}

}  // namespace
}  // namespace graphopt

#include "matmul_table/cpu/table_decoder.h"
