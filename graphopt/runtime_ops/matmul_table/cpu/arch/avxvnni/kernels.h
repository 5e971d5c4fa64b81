// Bytes alone; tables whose integers need more are multiplied by the kernels of AVX2.
#pragma once

#include <utility>
#include "matmul_table/cpu/arch/avx2/forms.h"
#include "matmul_table/cpu/byte_operand.h"
#include "matmul_table/cpu/products.h"

namespace graphopt {
namespace {

// Rows of a panel, and the widths that one may have: what 16 registers hold.
constexpr size_t kPanel = 6;
using Widths = std::index_sequence<1, 2, 4, 6>;

// Up to so many rows of x that are floats codes are looked up as they are multiplied.
constexpr size_t kGemvRows = 1;

// The same for rows of integers; of `kSmallM` in one panel.
constexpr size_t kSmallM = 2;
inline size_t small_m_rows(const Weights&) { return kSmallM; }

inline Words form_of_integers(const Weights& weights, bool is_small_m) {
  return form_of_integers(weights, is_small_m, kSumsBytes);
}

// What multiplies the bytes of a trellis.
using TrellisProduct = Int8<false>;

// What multiplies one row by a trellis; void for the same as a few rows.
template <int Bits>
using TrellisOfOneRow = std::enable_if_t<(Bits > 0)>;

// Sums side by side, which wait for one another less; of integers, so that their order is no matter.
template <typename Operand, size_t Width>
constexpr size_t kSumsOf = Operand::kSums;

// What multiplies everything that is not bytes: words of x are the same for both.
constexpr const MatMulKernels& kOthers = kMatMulAvx2;
// What multiplies up to `kSmallM` rows, where this set does not.
constexpr const MatMulKernels* kSmallMKernels = nullptr;

// Calls with_operand(type) where `type` is a pointer to the operand of these weights.
template <int Bits, typename WithOperand>
void choose_operand(const Weights& weights, Words, const WithOperand& with_operand) {
  choose_byte_operand<Bits>(weights.table, with_operand);
}

// The same where codes are looked up as they are multiplied.
template <int Bits, typename WithOperand>
void choose_operand_of_small_m(const Weights& weights, Words form, const WithOperand& with_operand) {
  choose_operand<Bits>(weights, form, with_operand);
}

// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights&, const Rounded&, const WithProduct& with_product) {
  with_product(static_cast<Int8<true>*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
