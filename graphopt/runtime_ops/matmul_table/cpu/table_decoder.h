// The decoder of floats where looking up each of their bytes costs one instruction; and without any, where it serves to
// compare. A set of instructions includes it behind its values_of().
#pragma once

#include "matmul_table/cpu/float_rows.h"

namespace graphopt {
namespace {

// What x becomes that is rounded to bfloat16.
constexpr Words kBfloat16Words = Words::kBfloat16s;

// Values rounded to bfloat16, two rows in a line.
template <int Bits>
class AsBfloat16s {
 public:
  static constexpr bool kExact = LookUp<Bits>::kExact;

  explicit AsBfloat16s(const Table& table) : table_(table) {}

  GRAPHOPT_FORCE_INLINE const Bytes& operator()(const Bytes& codes) const { return codes; }

  GRAPHOPT_FORCE_INLINE uint8_t* store(const Bytes& codes, uint8_t* to) const {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half, to += 2 * kLine) {
      store_line(to, values_of<Bits, 2>(table_.bfloat16s, codes, half));
    }
    return to;
  }

 private:
  const Table& table_;
};

// Any table, as floats.
template <int Bits>
class FloatsOfTable {
 public:
  static constexpr bool kExact = LookUp<Bits>::kExact, kIntegers = false;

  explicit FloatsOfTable(const Table& table) : table_(table) {}
  float unit() const { return 1; }

  GRAPHOPT_FORCE_INLINE Rows operator()(const Bytes& codes) const {
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

}  // namespace
}  // namespace graphopt
