#pragma once

#include <utility>
#include "matmul_table/cpu/arch/generic/operands.h"
#include "matmul_table/cpu/products.h"

namespace graphopt {
namespace {

// Rows of a panel, and the widths that one may have: what 32 registers hold.
constexpr size_t kPanel = 6;
using Widths = std::index_sequence<1, 2, 4, 6>;

// Up to so many rows of x that are floats codes are looked up as they are multiplied.
constexpr size_t kGemvRows = 1;

// The same for rows of integers; of `kSmallM` in one panel.
constexpr size_t kSmallM = 4;
inline size_t small_m_rows(const Weights& weights) {
  return weights.table.wide ? 2 : kSmallM;  // a wide table has twice as many sums
}

// What words hold of integers.
inline Words form_of_integers(const Weights&, bool) { return Words::kBytes; }

// What multiplies the bytes of a trellis.
using TrellisProduct = Int8<false>;

// What multiplies one row by a trellis; void for the same as a few rows.
template <int Bits>
using TrellisOfOneRow = std::enable_if_t<(Bits > 0)>;

// Sums side by side, which wait for one another less; of integers, so that their order is no matter.
template <typename Operand, size_t Width>
constexpr size_t kSumsOf = Width < 2 ? 2 : 1;

// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights& weights, const Rounded& rounded, const WithProduct& with_product) {
  if (rounded.form == Words::kFloats) return with_product(static_cast<Float*>(nullptr), std::false_type());
  if (weights.table.wide) return with_product(static_cast<Int8<false>*>(nullptr), std::true_type());
  with_product(static_cast<Int8<false>*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
