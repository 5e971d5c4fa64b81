// What kernels of all sets of instructions choose by: the bits of codes, the rows of x, and how both are multiplied.
#pragma once

#include <type_traits>

#include "matmul_table/cpu/gemm.h"
#include "matmul_table/cpu/small_m.h"

namespace graphopt {
namespace {

template <size_t... Width>
constexpr size_t kWidthsOf[] = {Width...};
template <size_t... Width>
constexpr const size_t* widths_of(std::index_sequence<Width...>) {
  return kWidthsOf<Width...>;
}

size_t most_small_m_rows(const Weights& weights, Activations kind) {
  if (kind != Activations::kInt8 && kind != Activations::kInt16) return kGemvRows;
  return small_m_rows(weights);
}

Words form_for(const Weights& weights, Activations kind, bool is_small_m) {
  if (kind == Activations::kFloat) return Words::kFloats;
  return kind == Activations::kBfloat16 ? kBfloat16Words : form_of_integers(weights, is_small_m);
}

// Calls with_bits(bits), known to the compiler.
template <typename WithBits>
void choose_bits(int bits, const WithBits& with_bits) {
  switch (bits) {
    case 1: return with_bits(std::integral_constant<int, 1>());
    case 2: return with_bits(std::integral_constant<int, 2>());
    case 3: return with_bits(std::integral_constant<int, 3>());
    case 4: return with_bits(std::integral_constant<int, 4>());
    case 5: return with_bits(std::integral_constant<int, 5>());
    case 6: return with_bits(std::integral_constant<int, 6>());
    case 7: return with_bits(std::integral_constant<int, 7>());
    default: return with_bits(std::integral_constant<int, 8>());
  }
}

// Whether zero points or minimums are part of each value: with floats alone.
inline bool shifts(const Weights& weights, const Rounded& rounded) {
  return rounded.kind == Activations::kFloat && weights.has_zero_points();
}

// Calls with_filling(filling) with what fills blocks with the values of an operand for x in this form.
template <int Bits, typename WithFilling>
void choose_operand_filling(const Weights& weights, const Rounded& rounded, const WithFilling& with_filling) {
  choose_operand<Bits>(weights, rounded.form, [&](auto* null) {
    using Operand = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    const Operand operand(weights.table);
    with_filling(Filling{fill_with_operand<Bits, Operand>, &operand, false, 1});
  });
}

// Multiplies by blocks that a filling fills.
inline auto gemm_with(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  return [=, &weights, &rounded](const Filling& fill) {
    choose_product(weights, rounded, [&](auto* null, auto wide) {
      using Kind = std::remove_pointer_t<decltype(null)>;
      multiply_gemm<Kind, decltype(wide)::value>(weights, rounded, fill, y, first, end);
    });
  };
}

// Panels pass by two tiles, whose codes stay in the first level of the caches and are looked up for each.
template <int Bits, typename Operand>
void multiply_panels_of_small_m(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  const size_t tiles = rounded.panels() == 1 ? end - first : 2;
  for (size_t tile = first; tile < end; tile += tiles) {
    const size_t end_tile = tile + tiles < end ? tile + tiles : end;
    for (size_t panel = 0; panel < rounded.panels(); ++panel) {
      choose_width(rounded.width(panel), [&](auto width) {
        multiply_small_m<Bits, Operand, decltype(width)::value>(weights, rounded, y, tile, end_tile, panel);
      }, Widths());
    }
  }
}

// Widths up to this one are those of panels of few rows: without it, rows that need a wider panel would be left out.
template <size_t... Width>
constexpr bool is_width(size_t width, std::index_sequence<Width...>) {
  return ((width == Width) || ...);
}
static_assert(kSmallM == 0 || is_width(kSmallM, Widths()));

// Small M for integers; `gemm` multiplies what has no kernel of its own here.
template <typename Gemm>
void small_m_of_integers(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end,
                         const Gemm& gemm) {
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    choose_operand_of_small_m<kBits>(weights, rounded.form, [&](auto* null) {
      using Operand = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
      // rare formats take the compiler as long as others
      if constexpr (kBits < 3 || kBits == 7) {
        if (rounded.width(0) > 1) return gemm(weights, rounded, y, first, end);
        return multiply_small_m<kBits, Operand, 1>(weights, rounded, y, first, end);
      } else if constexpr (Operand::kHasPanels) {
        multiply_panels_of_small_m<kBits, Operand>(weights, rounded, y, first, end);
      } else {
        choose_width(rounded.width(0), [&](auto width) {
          if constexpr (decltype(width)::value <= kSmallM) {
            multiply_small_m<kBits, Operand, decltype(width)::value>(weights, rounded, y, first, end);
          }
        }, Widths());
      }
    });
  });
}

}  // namespace
}  // namespace graphopt
