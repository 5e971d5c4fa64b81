#pragma once

#include "matmul_table/cpu/byte_operand.h"
#include "matmul_table/cpu/kernels.h"
#include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, float_decoders.h)

namespace graphopt {
namespace {

// Calls with_operand(type) with a pointer to the operand of these weights where codes are looked up as they are
// multiplied.
template <int Bits, typename WithOperand>
void choose_operand_of_small_m(const Weights& weights, Words, const WithOperand& with_operand) {
  if (weights.table.wide) return with_operand(static_cast<const AsBytes<Bits, true, false, false>*>(nullptr));
  choose_byte_operand<Bits>(weights.table, with_operand);
}

// The same where looked up values are kept in a block.
template <int Bits, typename WithOperand>
void choose_operand(const Weights& weights, Words form, const WithOperand& with_operand) {
  if constexpr (kBfloat16Words == Words::kBfloat16s) {
    if (form == Words::kBfloat16s) return with_operand(static_cast<const AsBfloat16s<Bits>*>(nullptr));
  }
  choose_operand_of_small_m<Bits>(weights, form, with_operand);
}

}  // namespace
}  // namespace graphopt
