#pragma once

#include <utility>
#include "matmul_table/cpu/arch/generic/operands.h"
#include "matmul_table/cpu/bfloat16_product.h"

namespace graphopt {
namespace {

// Rows of a panel, and the widths that one may have: 24 sums, of 32 registers.
constexpr size_t kPanel = 12;
using Widths = std::index_sequence<1, 2, 4, 8, 12>;

// Up to so many rows of x that are floats codes are looked up as they are multiplied.
constexpr size_t kGemvRows = 0;

// The same for rows of integers; of `kSmallM` in one panel.
// More panels than `kRunPanels` are faster by a block, whose codes are looked up once.
constexpr size_t kSmallM = 8, kRunPanels = 3;
inline size_t small_m_rows(const Weights& weights) {
  const bool runs = weights.bits == 4 && !weights.table.wide && !weights.table.is_trellis;
  return runs ? kRunPanels * kPanel : kSmallM;
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
constexpr size_t kSumsOf = Width < 4 ? 4 / Width : 1;

}  // namespace
}  // namespace graphopt
