#include "matmul_table/cpu/kernels.h"

#include <type_traits>

#include "abi/instructions.h"
#include "matmul_table/cpu/blocked.h"
#include "matmul_table/cpu/few.h"
#include "matmul_table/cpu/one.h"
#if !GRAPHOPT_BYTES_ALONE
#include "matmul_table/cpu/round.h"
#endif

namespace graphopt {
namespace {

#if defined(__AVX512F__)
constexpr size_t kFew = 8, kFewFloats = 0, kPanel = 12, kWidths[] = {1, 2, 4, 8, 12};
#elif GRAPHOPT_BY_PAIRS
constexpr size_t kFew = 2, kFewFloats = 1, kPanel = 6, kWidths[] = {1, 2, 4, 6};  // what 16 registers hold
#elif GRAPHOPT_NEON
constexpr size_t kFew = 4, kFewFloats = 1, kPanel = 6, kWidths[] = {1, 2, 4, 6};  // what 32 registers hold
#else
constexpr size_t kFew = 0, kFewFloats = 0, kPanel = 2, kWidths[] = {1, 2};
#endif

// Without an instruction for it, products of bytes are summed up only where two fit 16 bits, and bfloat16 is float.
Words form_for(const Weights& weights, Activations kind, bool is_few) {
  if (kind == Activations::kFloat) return Words::kFloats;
  if (kind == Activations::kBfloat16) return kDecodesFloats ? Words::kFloats : Words::kBfloat16s;
  const Table& table = weights.table;
#if GRAPHOPT_BY_PAIRS
  if (is_few && is_minifloat(table, weights.bits)) return Words::kBytes;
  if (is_few && table.wide && weights.bits >= 3 && weights.bits <= 5) return Words::kFours;
#else
  (void)is_few;
#endif
  return kByPairs && (table.wide || (!kSumsBytes && table.most > 128)) ? Words::kPairs : Words::kBytes;
}

// More panels than this are faster by a block, whose codes are looked up once.
constexpr size_t kFewPanels = 3;

// Whether the sums of a unit fit 16 bits, so that the registers hold those of a whole panel; see Int8Runs. Formats of
// fewer bits are rare, and those of more have larger bytes.
bool by_runs(const Weights& weights) {
  return kByPairs && !kBytesAlone && weights.bits >= 3 && weights.bits <= 5 && !weights.table.wide &&
         weights.table.most <= 32;
}

size_t most_few(const Weights& weights, Activations kind) {
  if (kind != Activations::kInt8 && kind != Activations::kInt16) return kFewFloats;
  const size_t most = GRAPHOPT_NEON && weights.table.wide ? 2 : kFew;  // a wide table has twice as many sums
  return by_runs(weights) ? kFewPanels * kPanel : most;
}

// Whether zero points or minimums are part of each value: with floats alone.
[[maybe_unused]] bool shifts(const Weights& weights, const Rounded& rounded) {
  return rounded.kind == Activations::kFloat && (weights.zero_points || weights.half_zero_points);
}

#if GRAPHOPT_BYTES_ALONE
// Other products are those of the set that has all: words of x are the same for both.
#if GRAPHOPT_NEON
constexpr const MatMulKernels& kOfAll = kMatMulNeon;
#else
constexpr const MatMulKernels& kOfAll = kMatMulAvx2;
#endif

bool multiplies_bytes(const Weights& weights, const Rounded& rounded) {
  return rounded.form == Words::kBytes && !(kByPairs && weights.table.wide);
}
#endif

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

void many(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end);

// Zero points mostly come with integers; values of other tables go through a block.
template <int Bits>
void one(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  choose_decoder<Bits>(weights.table, rounded.kind, [&](const auto& decoder) {
    using Decoder = std::remove_const_t<std::remove_reference_t<decltype(decoder)>>;
    if (!shifts(weights, rounded)) return multiply_one<Bits, false>(weights, rounded, decoder, y, first, end);
    if constexpr (Decoder::kIntegers) return multiply_one<Bits, true>(weights, rounded, decoder, y, first, end);
    many(weights, rounded, y, first, end);
  });
}

#if GRAPHOPT_BY_PAIRS && !GRAPHOPT_BYTES_ALONE
// Panels pass by two tiles, whose codes stay in the first level of the caches and are looked up for each.
template <int Bits, typename Operand>
void few_by_runs(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  const size_t tiles = rounded.panels() == 1 ? end - first : 2;
  for (size_t tile = first; tile < end; tile += tiles) {
    const size_t end_tile = tile + tiles < end ? tile + tiles : end;
    for (size_t panel = 0; panel < rounded.panels(); ++panel) {
      const auto multiply = [&](auto width) {
        multiply_few<Bits, Operand, decltype(width)::value, true>(weights, rounded, y, tile, end_tile, panel);
      };
      switch (rounded.width(panel)) {
        case 1: multiply(std::integral_constant<size_t, 1>()); break;
        case 2: multiply(std::integral_constant<size_t, 2>()); break;
        case 4: multiply(std::integral_constant<size_t, 4>()); break;
        default: multiply(std::integral_constant<size_t, 6>());
      }
    }
  }
}
#endif

void few(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
#if GRAPHOPT_MATRICES_ALONE
  kMatMulDotprod.multiply_few(weights, rounded, y, first, end);
#else
#if GRAPHOPT_BYTES_ALONE
  if (!multiplies_bytes(weights, rounded)) return kOfAll.multiply_few(weights, rounded, y, first, end);
#endif
#if defined(GRAPHOPT_VECTOR_BYTES)
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if constexpr (kFewFloats && !kBytesAlone) {
      if (rounded.form == Words::kFloats) return one<kBits>(weights, rounded, y, first, end);
    }
    choose_operand_of_few<kBits>(weights.table, rounded.form, [&](auto* null) {
      using Operand = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
      // rare formats take the compiler as long as others
      constexpr bool kRare = kBits < 3 || kBits == 7;
      if constexpr (kRare) {
        if (rounded.width(0) > 1) return many(weights, rounded, y, first, end);
        return multiply_few<kBits, Operand, 1>(weights, rounded, y, first, end);
      }
#if GRAPHOPT_BY_PAIRS && !GRAPHOPT_BYTES_ALONE
      if constexpr (kBits <= 5 && !kRare && Operand::kPairsFit) {
        if (by_runs(weights)) return few_by_runs<kBits, Operand>(weights, rounded, y, first, end);
      }
#endif
      switch (rounded.width(0)) {
        case 1: return multiply_few<kBits, Operand, 1>(weights, rounded, y, first, end);
        case 2: return multiply_few<kBits, Operand, 2>(weights, rounded, y, first, end);
        case 4:
          if constexpr (kFew >= 4) return multiply_few<kBits, Operand, 4>(weights, rounded, y, first, end);
          break;
        default:
          if constexpr (kFew >= 8) return multiply_few<kBits, Operand, 8>(weights, rounded, y, first, end);
      }
    });
  });
#else
  many(weights, rounded, y, first, end);
#endif
#endif
}

// Calls with_filling(filling) with what fills blocks with values for x in this form.
template <int Bits, typename WithFilling>
void choose_filling(const Weights& weights, const Rounded& rounded, const WithFilling& with_filling) {
  if constexpr (!kBytesAlone) {
    if (rounded.form == Words::kFloats) {
      return choose_decoder<Bits>(weights.table, rounded.kind, [&](const auto& decoder) {
        using Decoder = std::remove_const_t<std::remove_reference_t<decltype(decoder)>>;
        with_filling(Filling{fill_with_floats<Bits, Decoder>, &decoder, shifts(weights, rounded), decoder.unit()});
      });
    }
  }
  if constexpr (!kDecodesFloats) {
    if (rounded.form == Words::kBfloat16s) return with_filling(Filling{fill_with_bfloat16s<Bits>, nullptr, false, 1});
  }
  choose_operand<Bits>(weights.table, rounded.form, [&](auto* null) {
    using Operand = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    const Operand operand(weights.table);
    with_filling(Filling{fill_with_integers<Bits, Operand>, &operand, false, 1});
  });
}

void many(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
#if GRAPHOPT_BYTES_ALONE
  if (!multiplies_bytes(weights, rounded)) return kOfAll.multiply(weights, rounded, y, first, end);
#endif
  const auto with_filling = [&](const Filling& fill) {
#if !GRAPHOPT_BYTES_ALONE
    if (rounded.form == Words::kFloats) return multiply_many<Float, false>(weights, rounded, fill, y, first, end);
#if GRAPHOPT_BY_PAIRS
    if (rounded.form == Words::kPairs) return multiply_many<Int16, false>(weights, rounded, fill, y, first, end);
    if (weights.table.most <= 32) return multiply_many<Int8Runs, false>(weights, rounded, fill, y, first, end);
#elif !GRAPHOPT_NEON
    if (rounded.form == Words::kBfloat16s) return multiply_many<Bfloat16, false>(weights, rounded, fill, y, first, end);
#endif
#endif
#if GRAPHOPT_MATRICES_ALONE
    using Int8s = Int8Matrices;
#else
    using Int8s = Int8<kByPairs>;
#endif
#if !GRAPHOPT_BY_PAIRS
    if (weights.table.wide) return multiply_many<Int8s, true>(weights, rounded, fill, y, first, end);
#endif
    multiply_many<Int8s, false>(weights, rounded, fill, y, first, end);
  };
  choose_bits(weights.bits, [&](auto bits) { choose_filling<decltype(bits)::value>(weights, rounded, with_filling); });
}

#if !GRAPHOPT_BYTES_ALONE
int largest_code(const Weights& weights, size_t first_tile, size_t end_tile) {
  int largest = 0;
  choose_bits(weights.bits, [&](auto bits) {
    const uint8_t* unit = weights.codes + first_tile * weights.tile_bytes();
    Bytes most = {};
    for (size_t left = (end_tile - first_tile) * weights.units(); left; --left, unit += weights.unit_bytes()) {
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
#else
void round_panel(const Weights& weights, const Rounded& rounded, const float* rows, size_t panel) {
  kOfAll.round(weights, rounded, rows, panel);
}

int largest_code(const Weights& weights, size_t first_tile, size_t end_tile) {
  return kOfAll.largest_code(weights, first_tile, end_tile);
}
#endif

}  // namespace

const MatMulKernels GRAPHOPT_NAME(kMatMul) = {
    most_few, kPanel, kWidths, form_for, round_panel, few, many, largest_code};

}  // namespace graphopt
