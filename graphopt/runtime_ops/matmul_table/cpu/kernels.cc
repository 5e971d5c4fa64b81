#include "matmul_table/cpu/kernels.h"

#include <type_traits>

#include "abi/instructions.h"
#include "matmul_table/cpu/blocked.h"
#include "matmul_table/cpu/few.h"
#include "matmul_table/cpu/round.h"

namespace graphopt {
namespace {

#if defined(__AVX512F__)
constexpr size_t kFew = 8, kPanel = 12;
#elif defined(__AVX2__)
constexpr size_t kFew = 4, kPanel = 2;  // what 16 registers hold
#else
constexpr size_t kFew = 4, kPanel = 2;
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

// Calls with_small(small), known to the compiler.
template <typename WithSmall>
void choose_small(const Table& table, const WithSmall& with_small) {
  if (kSmallIsFaster && table.small) return with_small(std::bool_constant<kSmallIsFaster>());
  return with_small(std::false_type());
}

template <int Bits, size_t Width>
void few_of_width(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (weights.table.wide) return multiply_few<Bits, true, false, false, Width>(weights, rounded, y, first, end);
  choose_small(weights.table, [&](auto small) {
    constexpr bool kSmall = decltype(small)::value;
    // where a table is one register, looking up costs no more than the exclusive or
    if constexpr (!(kVectorBytes == kLine && Bits <= 6)) {
      if (weights.table.by_xor) return multiply_few<Bits, false, true, kSmall, Width>(weights, rounded, y, first, end);
    }
    return multiply_few<Bits, false, false, kSmall, Width>(weights, rounded, y, first, end);
  });
}

void few(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    switch (rounded.width(0)) {
      case 1: return few_of_width<kBits, 1>(weights, rounded, y, first, end);
      case 2: return few_of_width<kBits, 2>(weights, rounded, y, first, end);
      case 4: return few_of_width<kBits, 4>(weights, rounded, y, first, end);
      default:
        if constexpr (kFew >= 8) return few_of_width<kBits, 8>(weights, rounded, y, first, end);
    }
  });
}

void many(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  choose_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (rounded.kind == Activations::kFloat) return multiply_many<Float, kBits, false>(weights, rounded, y, first, end);
    if (rounded.kind == Activations::kBfloat16)
      return multiply_many<Bfloat16, kBits, false>(weights, rounded, y, first, end);
    if (weights.table.wide) return multiply_many<Int8<false>, kBits, true>(weights, rounded, y, first, end);
    choose_small(weights.table, [&](auto small) {
      return multiply_many<Int8<decltype(small)::value>, kBits, false>(weights, rounded, y, first, end);
    });
  });
}

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

}  // namespace

const MatMulKernels GRAPHOPT_NAME(kMatMul) = {kFew, kPanel, round_panel, few, many, largest_code};

}  // namespace graphopt
