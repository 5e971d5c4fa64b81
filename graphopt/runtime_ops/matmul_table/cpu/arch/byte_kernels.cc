// The kernels of a set of instructions that has products of bytes of its own, and nothing else.
#include "abi/instructions.h"
#include "matmul_table/cpu/trellis.h"

namespace graphopt {
namespace {

bool multiplies(const Weights& weights, const Rounded& rounded) {
  return rounded.form == Words::kBytes && !(kByPairs && weights.table.wide);
}

void gemm(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (!multiplies(weights, rounded)) return kOthers.gemm(weights, rounded, y, first, end);
  if (weights.table.is_trellis) return gemm_of_trellis(weights, rounded, y, first, end);
  const auto with_filling = gemm_with(weights, rounded, y, first, end);
  choose_bits(weights.bits, [&](auto bits) {
    choose_operand_filling<decltype(bits)::value>(weights, rounded, with_filling);
  });
}

template <const MatMulKernels* Kernels = kSmallMKernels>
void small_m(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if constexpr (Kernels != nullptr) {
    Kernels->small_m(weights, rounded, y, first, end);
  } else if (multiplies(weights, rounded)) {
    if (weights.table.is_trellis) return small_m_of_trellis(weights, rounded, y, first, end);
    small_m_of_integers(weights, rounded, y, first, end, gemm);
  } else {
    kOthers.small_m(weights, rounded, y, first, end);
  }
}

void round_panel(const Weights& weights, const Rounded& rounded, const float* rows, size_t panel) {
  kOthers.round(weights, rounded, rows, panel);
}

int largest_code(const Weights& weights, size_t first_tile, size_t end_tile) {
  return kOthers.largest_code(weights, first_tile, end_tile);
}

}  // namespace

const MatMulKernels GRAPHOPT_NAME(kMatMul) = {
    most_small_m_rows, kPanel, widths_of(Widths()), form_for, round_panel, small_m<>, gemm, largest_code};

}  // namespace graphopt
