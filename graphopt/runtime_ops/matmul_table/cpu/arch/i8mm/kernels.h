// Bytes of several rows alone: a matrix of 2 x 8 numbers times one of 8 x 2.
#pragma once

#include <utility>
#include "matmul_table/cpu/arch/generic/operands.h"
#include "matmul_table/cpu/arch/i8mm/products.h"

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

// What multiplies the bytes of a trellis, one row of them.
using TrellisProduct = Int8<false>;

// What multiplies one row by a trellis; void for the same as a few rows.
template <int Bits>
using TrellisOfOneRow = std::enable_if_t<(Bits > 0)>;

// Sums side by side, which wait for one another less; of integers, so that their order is no matter.
template <typename Operand, size_t Width>
constexpr size_t kSumsOf = Width < 2 ? 2 : 1;

// What multiplies everything that is not bytes: words of x are the same for both.
constexpr const MatMulKernels& kOthers = kMatMulNeon;
// What multiplies up to `kSmallM` rows, where this set does not.
constexpr const MatMulKernels* kSmallMKernels = &kMatMulDotprod;

}  // namespace
}  // namespace graphopt
