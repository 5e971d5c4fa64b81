// Products of lines of looked up values with words of x: each kind has its type of sums, the lines that a unit has in a
// block, and multiply(), which adds a segment's products to the sums of `Width` rows.
#pragma once

#include <type_traits>

#include "arch/vector.h"
#include "matmul_table/cpu/kernels.h"

namespace graphopt {
namespace {

// Units whose products an operand or a kind sums up in one run, without sums in memory; 0 where it has no runs.
template <typename Kind, typename = void>
constexpr size_t kRunUnits = 0;
template <typename Kind>
constexpr size_t kRunUnits<Kind, std::void_t<decltype(Kind::kRunUnits)>> = Kind::kRunUnits;

// Sides of a block that are multiplied at once: as many as there are registers for the sums.
constexpr size_t sides_at_once(size_t width) { return kVectorBytes < kLine && width > 2 ? 1 : 2; }

// Adds the products of a segment of `units` units and `Width` rows to their sums.
template <typename Kind, size_t Width, size_t kSides>
GRAPHOPT_FORCE_INLINE void multiply_lines(typename Kind::Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                          size_t units) {
  for (size_t lines = units * Kind::kLines; lines; --lines, line += 2 * kLine, word += Width) {
    Bytes values[kSides];
#pragma GCC unroll 2
    for (size_t side = 0; side < kSides; ++side) values[side] = load_line<Bytes>(line + side * kLine);
#pragma GCC unroll 12
    for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
        sums[row][side] = Kind::dot_line(sums[row][side], values[side], word[row]);
      }
    }
  }
}

// A kind that says how one word is multiplied with one line.
template <typename Kind>
struct ByLines {
  template <size_t Width, typename Sum, size_t kSides>
  static GRAPHOPT_FORCE_INLINE void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                             size_t units) {
    multiply_lines<Kind, Width, kSides>(sums, line, word, units);
  }
};

template <bool Small>
struct Int8 : ByLines<Int8<Small>> {
  static constexpr size_t kLines = 4;
  static constexpr bool kFromZero = false;
  using Sum = Integers;
  static GRAPHOPT_FORCE_INLINE Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot<Small>(sum, line, word);
  }
};

struct Float : ByLines<Float> {
  static constexpr size_t kLines = 16;
  using Sum = Floats;
  static GRAPHOPT_FORCE_INLINE Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    const auto part = [&](size_t i) { return reinterpret_cast<Floats::Part>(line.part[i]); };
    return dot_float(sum, by_parts<Floats>(part), word);
  }
};

}  // namespace
}  // namespace graphopt
