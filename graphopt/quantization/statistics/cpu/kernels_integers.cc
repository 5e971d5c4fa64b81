// Compiled once for each set of instructions. Integers are exact, so all of them give the same bits.
#include "cpu/integers.h"

#include "abi/instructions.h"
#include "arch/line.h"
#include GRAPHOPT_FAMILY_HEADER(cpu/arch, pairs.h)

namespace graphopt {
namespace {

constexpr size_t kPanel = kIntegerPanel, kLines = kPanel / kColumns;
constexpr size_t kPairs = 32;  // of both panels, which stay in the first cache, half of it for a tile of sums

// Scales of vectors from their largest magnitudes, which become what a number is multiplied by.
void set_scales(float* largest, float* scales, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const bool is_finite = largest[i] <= 3.4028234e38f, is_seen = largest[i] >= 1e-30f;
    scales[i] = is_finite ? (is_seen ? largest[i] / kLargestInteger : 0.0f) : __builtin_nanf("");
    largest[i] = is_finite && is_seen ? kLargestInteger / largest[i] : 0.0f;
  }
}

// Bits of magnitudes, which are in the order of the magnitudes; those of a NaN become infinity's.
GRAPHOPT_FORCE_INLINE Integers larger(const Integers& most, const Integers& numbers) {
  return by_parts<Integers>([&](size_t i) {
    const Integers::Part bits = numbers.part[i] & 0x7fffffff;
    const Integers::Part size = bits > 0x7f800000 ? 0x7f800000 - Integers::Part{} : bits;
    return size > most.part[i] ? size : most.part[i];
  });
}

// The nearest integers; those in the middle become even. Where a factor is 0 the number may be anything.
GRAPHOPT_FORCE_INLINE Integers round_to_even(const Floats& numbers, const Floats& factors) {
  constexpr float kMagic = 12582912.0f;  // 1.5 x 2^23
  return by_parts<Integers>([&](size_t i) {
    const Floats::Part rounded = (numbers.part[i] * factors.part[i] + kMagic) - kMagic;
    return __builtin_convertvector(rounded, Integers::Part) & (factors.part[i] != Floats::Part{});
  });
}

GRAPHOPT_FORCE_INLINE Integers add_squares(const Integers& sum, const Integers& numbers) {
  return by_parts<Integers>([&](size_t i) { return sum.part[i] + numbers.part[i] * numbers.part[i]; });
}

// Some numbers as a whole panel, zeros behind them.
inline const float* pad(const float* numbers, size_t count, float* panel) {
  if (count == kPanel) return numbers;
  for (size_t i = 0; i < kPanel; ++i) panel[i] = i < count ? numbers[i] : 0.0f;
  return panel;
}

// Vectors side by side: numbers of a pair of tokens, say, for 64 inputs.
void convert_columns(const IntegersWork& work, size_t begin, size_t width) {
  alignas(kLine) float factors[kPanel], panel[kPanel];
  Integers most[kLines] = {};
  for (size_t j = 0; j < work.length; ++j) {
    const float* row = pad(work.x + j * work.number_stride + begin, width, panel);
    for (size_t i = 0; i < kLines; ++i) most[i] = larger(most[i], load_line<Integers>(row + i * kColumns));
  }
  for (size_t i = 0; i < kLines; ++i) store_line(factors + i * kColumns, most[i]);
  set_scales(factors, work.scales + begin, width);
  const size_t pairs = (work.length + 1) / 2;
  int16_t* to = work.integers + begin * pairs * 2;
  uint64_t totals[kPanel] = {};
  for (size_t segment = 0; segment < pairs; segment += kIntegerSegment) {
    const size_t end = pairs - segment < kIntegerSegment ? pairs : segment + kIntegerSegment;
    Integers squares[kLines] = {};
    for (size_t pair = segment; pair < end; ++pair, to += 2 * kPanel) {
      Integers rows[2][kLines];
      for (size_t half = 0; half < 2; ++half) {
        const bool has_row = 2 * pair + half < work.length;
        const float* row = has_row ? work.x + (2 * pair + half) * work.number_stride + begin : nullptr;
        row = pad(row, has_row ? width : 0, panel);
        for (size_t i = 0; i < kLines; ++i) {
          rows[half][i] =
              round_to_even(load_line<Floats>(row + i * kColumns), load_line<Floats>(factors + i * kColumns));
          squares[i] = add_squares(squares[i], rows[half][i]);
        }
      }
      for (size_t i = 0; i < kLines; ++i) {
        store_line(to + 2 * i * kColumns, by_parts<Integers>([&](size_t part) {
                     return (rows[0][i].part[part] & 0xffff) | rows[1][i].part[part] * 0x10000;
                   }));
      }
    }
    for (size_t i = 0; i < kLines; ++i) {
      int32_t lanes[kColumns];
      store_line(lanes, squares[i]);
      for (size_t lane = 0; lane < kColumns; ++lane) totals[i * kColumns + lane] += static_cast<uint64_t>(lanes[lane]);
    }
  }
  for (size_t i = 0; i < width; ++i) work.squares[begin + i] = totals[i];
}

// Vectors whose numbers lie side by side.
void convert_rows(const IntegersWork& work, size_t begin, size_t width) {
  constexpr size_t kStrip = kPanel;  // numbers of a vector that are converted together
  const size_t pairs = (work.length + 1) / 2;
  float factors[kPanel] = {}, panel[kStrip];
  for (size_t i = 0; i < width; ++i) {
    const float* row = work.x + (begin + i) * work.vector_stride;
    Integers most = {};
    for (size_t j = 0; j < work.length; j += kStrip) {
      const float* strip = pad(row + j, work.length - j < kStrip ? work.length - j : kStrip, panel);
      for (size_t line = 0; line < kLines; ++line) most = larger(most, load_line<Integers>(strip + line * kColumns));
    }
    float lanes[kColumns];
    store_line(lanes, most);
    for (size_t lane = 0; lane < kColumns; ++lane) factors[i] = lanes[lane] > factors[i] ? lanes[lane] : factors[i];
  }
  set_scales(factors, work.scales + begin, width);
  int16_t* to = work.integers + begin * pairs * 2;
  uint64_t totals[kPanel] = {};
  for (size_t first = 0; first < pairs; first += kStrip / 2) {
    const size_t count = pairs - first < kStrip / 2 ? pairs - first : kStrip / 2;
    for (size_t i = 0; i < kPanel; ++i) {
      int16_t strip[kStrip];
      if (i < width) {
        const size_t numbers = work.length - 2 * first < kStrip ? work.length - 2 * first : kStrip;
        const float* row = pad(work.x + (begin + i) * work.vector_stride + 2 * first, numbers, panel);
        const Floats factor = all_lanes(factors[i]);
        Integers squares = {};
        for (size_t line = 0; line < kLines; ++line) {
          const Integers integers = round_to_even(load_line<Floats>(row + line * kColumns), factor);
          squares = add_squares(squares, integers);
          int32_t lanes[kColumns];
          store_line(lanes, integers);
          for (size_t lane = 0; lane < kColumns; ++lane) {
            strip[line * kColumns + lane] = static_cast<int16_t>(lanes[lane]);
          }
        }
        int32_t lanes[kColumns];
        store_line(lanes, squares);
        for (size_t lane = 0; lane < kColumns; ++lane) totals[i] += static_cast<uint64_t>(lanes[lane]);
      } else {
        for (size_t j = 0; j < kStrip; ++j) strip[j] = 0;
      }
      for (size_t pair = 0; pair < count; ++pair) {
        __builtin_memcpy(to + 2 * ((first + pair) * kPanel + i), strip + 2 * pair, 2 * sizeof(int16_t));
      }
    }
  }
  for (size_t i = 0; i < width; ++i) work.squares[begin + i] = totals[i];
}

void convert(const IntegersWork& work) {
  for (size_t begin = 0; begin < work.vectors; begin += kPanel) {
    const size_t width = work.vectors - begin < kPanel ? work.vectors - begin : kPanel;
    (work.vector_stride == 1 ? convert_columns : convert_rows)(work, begin, width);
  }
}

// Adds the products of kRows vectors and kPlaces lines of others.
GRAPHOPT_FORCE_INLINE void add_products(const int16_t* left, const int16_t* right, size_t pairs, int32_t* tile) {
  Lanes sums[kRows][kPlaces];
#pragma GCC unroll 8
  for (size_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kPlaces; ++i) {
      __builtin_memcpy(&sums[row][i], tile + row * kPanel + i * kLanesOf, sizeof(Lanes));
    }
  }
#pragma GCC unroll 4
  for (size_t pair = 0; pair < pairs; ++pair, left += 2 * kPanel, right += 2 * kPanel) {
    Pairs numbers[kPlaces];
#pragma GCC unroll 8
    for (size_t i = 0; i < kPlaces; ++i) numbers[i] = load_pairs(right + 2 * i * kLanesOf);
#pragma GCC unroll 8
    for (size_t row = 0; row < kRows; ++row) {
      const Pairs factor = spread_pair(left + 2 * row);
#pragma GCC unroll 8
      for (size_t i = 0; i < kPlaces; ++i) sums[row][i] = add_pairs(sums[row][i], factor, numbers[i]);
    }
  }
#pragma GCC unroll 8
  for (size_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kPlaces; ++i) {
      __builtin_memcpy(tile + row * kPanel + i * kLanesOf, &sums[row][i], sizeof(Lanes));
    }
  }
}

// Sums up a segment of a panel with another, of up to kIntegerSegment pairs.
void multiply_segment(const int16_t* left, const int16_t* right, size_t pairs, int32_t* tile) {
  for (size_t i = 0; i < kPanel * kPanel; ++i) tile[i] = 0;
  for (size_t begin = 0; begin < pairs; begin += kPairs) {
    const size_t count = pairs - begin < kPairs ? pairs - begin : kPairs;
    for (size_t column = 0; column < kPanel; column += kPlaces * kLanesOf) {
      for (size_t row = 0; row < kPanel; row += kRows) {
        add_products(left + 2 * (begin * kPanel + row), right + 2 * (begin * kPanel + column), count,
                     tile + row * kPanel + column);
      }
    }
  }
}

// Adds or writes the products of a panel with another, of the sums of their integers.
template <typename Sum>
GRAPHOPT_FORCE_INLINE void write_products(const IntegerProductsWork& work, size_t row, size_t column,
                                          const Sum* totals) {
  const size_t height = work.rows - row < kPanel ? work.rows - row : kPanel;
  const size_t width = work.columns - column < kPanel ? work.columns - column : kPanel;
  const float* scales = work.right_scales + column;
  for (size_t i = 0; i < height; ++i, totals += kPanel) {
    const double scale = static_cast<double>(work.left_scales[row + i]);
    const size_t offset = (row + i) * work.stride + column;
    // a loop for each, which compilers turn into vectors
    if (work.sums) {
      double* sums = work.sums + offset;
      for (size_t j = 0; j < width; ++j) {
        sums[j] += scale * static_cast<double>(scales[j]) * static_cast<double>(totals[j]);
      }
    } else {
      float* products = work.products + offset;
      for (size_t j = 0; j < width; ++j) {
        products[j] = static_cast<float>(scale * static_cast<double>(scales[j]) * static_cast<double>(totals[j]));
      }
    }
  }
}

void multiply(const IntegerProductsWork& work) {
  alignas(kLine) int32_t tile[kPanel * kPanel];
  alignas(kLine) double totals[kPanel * kPanel];
  for (size_t row = 0; row < work.rows; row += kPanel) {
    for (size_t column = work.half ? row : 0; column < work.columns; column += kPanel) {
      const int16_t *left = work.left + 2 * row * work.pairs, *right = work.right + 2 * column * work.pairs;
      if (work.pairs <= kIntegerSegment) {
        multiply_segment(left, right, work.pairs, tile);
        write_products(work, row, column, tile);
        continue;
      }
      for (size_t i = 0; i < kPanel * kPanel; ++i) totals[i] = 0;
      for (size_t segment = 0; segment < work.pairs; segment += kIntegerSegment) {
        const size_t remaining_pairs = work.pairs - segment;
        const size_t count = remaining_pairs < kIntegerSegment ? remaining_pairs : kIntegerSegment;
        multiply_segment(left + 2 * segment * kPanel, right + 2 * segment * kPanel, count, tile);
        for (size_t i = 0; i < kPanel * kPanel; ++i) totals[i] += static_cast<double>(tile[i]);
      }
      write_products(work, row, column, totals);
    }
  }
}

}  // namespace

extern const IntegersKernel GRAPHOPT_NAME(kIntegers);
const IntegersKernel GRAPHOPT_NAME(kIntegers) = convert;

extern const IntegerProductsKernel GRAPHOPT_NAME(kIntegerProducts);
const IntegerProductsKernel GRAPHOPT_NAME(kIntegerProducts) = multiply;

}  // namespace graphopt
