// bfloat16, where there is an instruction for it; and without any, where it serves to compare.
#pragma once

#include "matmul_table/cpu/products.h"

namespace graphopt {
namespace {

struct Bfloat16 : ByLines<Bfloat16> {
  static constexpr size_t kLines = 8;
  using Sum = Floats;
  static GRAPHOPT_FORCE_INLINE Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot_bfloat16(sum, line, word);
  }
};


// Calls with_product(kind, wide): a pointer to what multiplies these rows, and whether a block holds two bytes of each
// value.
template <typename WithProduct>
void choose_product(const Weights& weights, const Rounded& rounded, const WithProduct& with_product) {
  if (rounded.form == Words::kFloats) return with_product(static_cast<Float*>(nullptr), std::false_type());
  if (rounded.form == Words::kBfloat16s) return with_product(static_cast<Bfloat16*>(nullptr), std::false_type());
  if (weights.table.wide) return with_product(static_cast<Int8<false>*>(nullptr), std::true_type());
  with_product(static_cast<Int8<false>*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace graphopt
