#pragma once

#include <utility>
#include "matmul_table/cpu/arch/avx2/operands.h"
#include "matmul_table/cpu/arch/avx2/products.h"
#include "matmul_table/cpu/arch/avx2/trellis_halves.h"

namespace graphopt {
namespace {

// Rows of a panel, and the widths that one may have: what 16 registers hold.
constexpr size_t kPanel = 6;
using Widths = std::index_sequence<1, 2, 4, 6>;

// Up to so many rows of x that are floats codes are looked up as they are multiplied.
constexpr size_t kGemvRows = 1;

// The same for rows of integers; of `kSmallM` in one panel.
// More panels than `kRunPanels` are faster by a block, whose codes are looked up once; of short groups more than one, as
// sums of a block need not leave the registers before they are scaled. Neither need those of groups of whole runs; of
// groups of one, `kPanelsOfShortRuns` are faster than a block.
constexpr size_t kSmallM = 2, kRunPanels = 3, kShortGroup = 64, kPanelsOfShortRuns = 6;
inline size_t small_m_rows(const Weights& weights) {
  if (!sums_runs(weights)) return kSmallM;
  if (has_groups_of_runs(weights)) return (weights.group == kRowsOfRun ? kPanelsOfShortRuns : kRunPanels) * kPanel;
  return weights.group > kShortGroup ? kRunPanels * kPanel : kPanel;
}

inline Words form_of_integers(const Weights& weights, bool is_small_m) {
  return form_of_integers(weights, is_small_m, kSumsBytes);
}

// What multiplies the bytes of a trellis that reach further than `Int8<true>` takes.
using TrellisProduct = SignedBytes;

// What multiplies one row by a trellis, where its table fits; void for the same as a few rows.
template <int Bits>
using TrellisOfOneRow = std::conditional_t<Bits >= 2 && Bits <= 4, TrellisHalves<Bits >= 2 && Bits <= 4 ? Bits : 4>, void>;

// Sums side by side, which wait for one another less; of integers, so that their order is no matter.
template <typename Operand, size_t Width>
constexpr size_t kSumsOf = Operand::kSums;

}  // namespace
}  // namespace graphopt
