// The kernels of a set of instructions that has all of them; see README.md.
#include "matmul_table/cpu/kernels.h"

#include "abi/instructions.h"
#include "matmul_table/cpu/dispatch.h"
#include "matmul_table/cpu/gemv.h"
#include "matmul_table/cpu/round.h"
#include "matmul_table/cpu/trellis.h"

namespace graphopt {
namespace {

void gemm(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (weights.table.is_trellis) return gemm_of_trellis(weights, rounded, y, first, end);
  const auto with_filling = gemm_with(weights, rounded, y, first, end);
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (rounded.form == Words::kFloats) {
      return choose_decoder<kBits>(weights.table, rounded.kind, [&](const auto& decoder) {
        using Decoder = std::remove_const_t<std::remove_reference_t<decltype(decoder)>>;
        with_filling(Filling{fill_with_floats<kBits, Decoder>, &decoder, shifts(weights, rounded), decoder.unit()});
      });
    }
    choose_operand_filling<kBits>(weights, rounded, with_filling);
  });
}

// Zero points mostly come with integers; values of other tables go through a block.
void gemv(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    choose_decoder<kBits>(weights.table, rounded.kind, [&](const auto& decoder) {
      using Source = CodeSource<kBits, std::remove_const_t<std::remove_reference_t<decltype(decoder)>>>;
      const Source source{decoder};
      if (!shifts(weights, rounded)) return multiply_gemv<kBits, false>(weights, rounded, source, y, first, end);
      if constexpr (Source::kIntegers) return multiply_gemv<kBits, true>(weights, rounded, source, y, first, end);
      gemm(weights, rounded, y, first, end);
    });
  });
}

template <size_t GemvRows = kGemvRows, size_t SmallM = kSmallM>
void small_m(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (weights.table.is_trellis) {
    if constexpr (GemvRows > 0) {
      if (rounded.form == Words::kFloats) return gemv_of_trellis(weights, rounded, y, first, end);
    }
    return small_m_of_trellis(weights, rounded, y, first, end);
  }
  if constexpr (GemvRows > 0) {
    if (rounded.form == Words::kFloats) return gemv(weights, rounded, y, first, end);
  }
  if constexpr (SmallM > 0) {
    small_m_of_integers(weights, rounded, y, first, end, gemm);
  } else {
    gemm(weights, rounded, y, first, end);
  }
}

int largest_code(const Weights& weights, size_t first_tile, size_t end_tile) {
  int largest = 0;
  choose_bits(weights.bits, [&](auto bits) {
    const uint8_t* unit = weights.codes + first_tile * weights.tile_bytes();
    Bytes most = {};
    for (size_t units = (end_tile - first_tile) * weights.units(); units; --units, unit += weights.unit_bytes()) {
      for_each_line([&](auto j) {
        const Bytes codes = codes_of_line<decltype(bits)::value, true, decltype(j)::value>(unit);
        most = by_parts<Bytes>([&](size_t i) { return codes.part[i] > most.part[i] ? codes.part[i] : most.part[i]; });
      });
    }
    uint8_t bytes[kLine];
    store_line(bytes, most);
    for (uint8_t code : bytes) largest = code > largest ? code : largest;
  });
  return largest;
}

}  // namespace

const MatMulKernels GRAPHOPT_NAME(kMatMul) = {
    most_small_m_rows, kPanel, widths_of(Widths()), form_for, round_panel, small_m<>, gemm, largest_code};

}  // namespace graphopt
