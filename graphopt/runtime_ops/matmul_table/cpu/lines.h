// Lines of a block times a panel of rows, one segment at a time.
#pragma once

#include "matmul_table/cpu/vector.h"

namespace graphopt {
namespace {

// Sides of a block that are multiplied at once: as many as there are registers for the sums.
constexpr size_t sides_at_once(size_t width) { return kVectorBytes < kLine && width > 2 ? 1 : 2; }

// Adds the products of a segment of `units` units and `Width` rows to their sums.
template <typename Kind, size_t Width, size_t kSides>
GRAPHOPT_UNCALLED void multiply_lines(typename Kind::Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word,
                                    size_t units) {
  for (size_t left = units * Kind::kLines; left; --left, line += 2 * kLine, word += Width) {
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

// The kinds of operands: lines that a unit has in a block, and how a word is multiplied with a line.
template <typename Kind>
struct ByLines {
  template <size_t Width, typename Sum, size_t kSides>
  static GRAPHOPT_UNCALLED void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word, size_t units) {
    multiply_lines<Kind, Width, kSides>(sums, line, word, units);
  }
};

template <bool Small>
struct Int8 : ByLines<Int8<Small>> {
  static constexpr size_t kLines = 4;
  using Sum = Integers;
  static GRAPHOPT_UNCALLED Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot<Small>(sum, line, word);
  }
};

struct Bfloat16 : ByLines<Bfloat16> {
  static constexpr size_t kLines = 8;
  using Sum = Floats;
  static GRAPHOPT_UNCALLED Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot_bfloat16(sum, line, word);
  }
};

struct Float : ByLines<Float> {
  static constexpr size_t kLines = 16;
  using Sum = Floats;
  static GRAPHOPT_UNCALLED Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    const auto part = [&](size_t i) { return reinterpret_cast<Floats::Part>(line.part[i]); };
    return dot_float(sum, by_parts<Floats>(part), word);
  }
};

#if GRAPHOPT_MATRICES_ALONE
// Two rows of x times two columns at a time, 8 numbers of each: those of two lines.
struct Int8Matrices {
  static constexpr size_t kLines = 4;
  using Sum = Integers;

  template <size_t Width, size_t kSides>
  static GRAPHOPT_UNCALLED void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word, size_t units) {
    if constexpr (Width == 1) return multiply_lines<Int8<false>, 1, kSides>(sums, line, word, units);
    constexpr size_t kTwos = Width / 2;
    int32x4_t products[Width][kSides][kParts] = {};  // of rows 2 i and 2 i + 1: even parts of columns, then odd ones
    for (size_t left = units * kLines / 2; left; --left, line += 4 * kLine, word += 2 * Width) {
      int8x16_t x[kTwos];
#pragma GCC unroll 3
      for (size_t i = 0; i < kTwos; ++i) {
        const uint32x2_t first = vld1_u32(word + 2 * i), second = vld1_u32(word + Width + 2 * i);
        x[i] = vreinterpretq_s8_u32(vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second)));
      }
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
        const uint8_t* const at = line + side * kLine;
#pragma GCC unroll 4
        for (size_t part = 0; part < kParts; ++part) {
          const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(at + part * kVectorBytes));
          const uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(at + 2 * kLine + part * kVectorBytes));
          const int8x16_t even = vreinterpretq_s8_u32(vzip1q_u32(a, b)), odd = vreinterpretq_s8_u32(vzip2q_u32(a, b));
#pragma GCC unroll 3
          for (size_t i = 0; i < kTwos; ++i) {
            products[2 * i][side][part] = vmmlaq_s32(products[2 * i][side][part], x[i], even);
            products[2 * i + 1][side][part] = vmmlaq_s32(products[2 * i + 1][side][part], x[i], odd);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (size_t i = 0; i < kTwos; ++i) {
#pragma GCC unroll 2
      for (size_t side = 0; side < kSides; ++side) {
#pragma GCC unroll 4
        for (size_t part = 0; part < kParts; ++part) {
          const int32x4_t even = products[2 * i][side][part], odd = products[2 * i + 1][side][part];
          const int32x4_t first = vcombine_s32(vget_low_s32(even), vget_low_s32(odd));
          const int32x4_t second = vcombine_s32(vget_high_s32(even), vget_high_s32(odd));
          sums[2 * i][side].part[part] += reinterpret_cast<Integers::Part>(first);
          sums[2 * i + 1][side].part[part] += reinterpret_cast<Integers::Part>(second);
        }
      }
    }
  }
};
#endif

#if GRAPHOPT_BY_PAIRS
struct Int16 : ByLines<Int16> {
  static constexpr size_t kLines = 8;
  using Sum = Integers;
  static GRAPHOPT_UNCALLED Sum dot_line(const Sum& sum, const Bytes& line, uint32_t word) {
    return dot_pairs(sum, line, word);
  }
};

// Bytes of 32 at most: eight products of them fit 16 bits, and those of a unit are summed up there.
struct Int8Runs {
  static constexpr size_t kLines = 4;
  using Sum = Integers;

  template <size_t Width, size_t kSides>
  static GRAPHOPT_UNCALLED void multiply(Sum (*sums)[kSides], const uint8_t* line, const uint32_t* word, size_t units) {
    for (size_t left = units; left; --left) {
      Line<int16_t> runs[Width][kSides];
#pragma GCC unroll 4
      for (size_t j = 0; j < kLines; ++j, line += 2 * kLine, word += Width) {
#pragma GCC unroll 12
        for (size_t row = 0; row < Width; ++row) {
          const __m256i x = _mm256_set1_epi32(static_cast<int>(word[row]));
#pragma GCC unroll 2
          for (size_t side = 0; side < kSides; ++side) {
            const auto products = by_parts<Line<int16_t>>([&](size_t i) __attribute__((always_inline)) {
              const auto* const at = reinterpret_cast<const __m256i*>(line + side * kLine) + i;
              return reinterpret_cast<Line<int16_t>::Part>(_mm256_maddubs_epi16(_mm256_load_si256(at), x));
            });
            Line<int16_t>& run = runs[row][side];
            run = j ? by_parts<Line<int16_t>>([&](size_t i) { return run.part[i] + products.part[i]; }) : products;
            settle(run);
          }
        }
      }
#pragma GCC unroll 12
      for (size_t row = 0; row < Width; ++row) {
#pragma GCC unroll 2
        for (size_t side = 0; side < kSides; ++side) {
          sums[row][side] = by_parts<Integers>([&](size_t i) __attribute__((always_inline)) {
            const __m256i run = reinterpret_cast<__m256i>(runs[row][side].part[i]);
            const __m256i pairs = _mm256_madd_epi16(run, _mm256_set1_epi16(1));
            return sums[row][side].part[i] + reinterpret_cast<Integers::Part>(pairs);
          });
        }
      }
    }
  }
};
#endif

}  // namespace
}  // namespace graphopt
