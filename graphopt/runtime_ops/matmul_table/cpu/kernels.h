// Kernels of the products with packed weights: raw pointers in, raw pointers out. kernels.cc is compiled once for each
// set of instructions.
#pragma once

#include "matmul_table/shared/weights.h"

namespace graphopt {

// What a word of 32 bits holds of a rounded row: 4 numbers of 8 bits, 2 of 16 bits, 2 bfloat16 or 1 float. Pairs of 16
// bits are numbers 0 and 2 of four, then 1 and 3: so are bytes that stand side by side taken apart. Fours are pairs in
// order, both words of a row side by side.
enum class Words { kBytes, kPairs, kFours, kBfloat16s, kFloats };

// Rows of x, rounded and laid out for the products.
//
// A row is cut into words of 32 bits. Rows stand together in panels, so that a product reads from one end to the other:
// [segment][panel][word of the segment][row of the panel]; of fours, [pair of words][row][word]. What is rounded to 16
// bits is 128 * upper + lower, two rows of 8 bits.
struct Rounded {
  Activations kind = Activations::kFloat;
  Words form = Words::kFloats;
  const size_t* widths = nullptr;  // that a panel may have, those of the kernels
  int levels = 127;        // the largest magnitude of a rounded number, upper half by itself where there are two
  float clip = 1;          // times the largest magnitude is what `levels` represents
  bool whole_row = false;  // a row has one scale, not one for each group of the weights
  bool of_range = false;   // `levels` steps go from the least number of a group to its largest, 0 among them
  size_t rows_of_x = 0;
  size_t panel = 1;   // rows of each panel but the last
  size_t padded = 1;  // rows of all panels
  uint32_t* words = nullptr;
  // For each segment and row, [segment][row]:
  float* scales = nullptr;      // of the rounded numbers, times the step of the table where they are integers
  float* sums = nullptr;        // of the rounded numbers before they are scaled
  int32_t* starts[2] = {};      // what a sum of products begins with, of low and high bytes: their offset is taken off

  size_t rows_of_one() const { return kind == Activations::kInt16 ? 2 : 1; }  // that a row of x becomes
  size_t rows() const { return rows_of_one() * rows_of_x; }
  size_t panels() const { return (rows() + panel - 1) / panel; }
  size_t words_of_unit() const { return form == Words::kFloats ? 16 : form == Words::kBytes ? 4 : 8; }
  size_t words_at_once() const { return form == Words::kFours ? 2 : 1; }  // of a row, side by side
  // The least width that `count` rows fit in; they are no more than the last of the widths.
  size_t width_for(size_t count) const {
    const size_t* width = widths;
    while (*width < count) ++width;
    return *width;
  }
  // Rows that panel `index` has room for: enough for those that are left.
  size_t width(size_t index) const {
    const size_t remaining_rows = rows() - index * panel;
    return remaining_rows < panel ? width_for(remaining_rows) : panel;
  }
  // The words of a panel in a segment of `units` units from `unit` on.
  uint32_t* words_of(size_t unit, size_t units, size_t index) const {
    return words + (unit * padded + units * index * panel) * words_of_unit();
  }
};

constexpr size_t kMostRows = 12;  // of a panel

struct MatMulKernels {
  // With up to so many rows codes are looked up as they are multiplied, by each panel; with more rows the looked up
  // values of two tiles are kept for all panels of `panel` rows.
  size_t (*small_m_rows)(const Weights&, Activations);
  size_t panel;
  const size_t* widths;  // that a panel may have, rising; `panel` is one, and small_m_rows() if that is less and not 0
  Words (*form)(const Weights&, Activations, bool is_small_m);
  void (*round)(const Weights&, const Rounded&, const float* rows, size_t panel);  // of x, those of the panel
  void (*small_m)(const Weights&, const Rounded&, float* y, size_t first_tile, size_t end_tile);
  void (*gemm)(const Weights&, const Rounded&, float* y, size_t first_tile, size_t end_tile);
  int (*largest_code)(const Weights&, size_t first_tile, size_t end_tile);
};

extern const MatMulKernels kMatMulScalar, kMatMulAvx2, kMatMulAvxVnni, kMatMulAvx512;
extern const MatMulKernels kMatMulNeon, kMatMulDotprod, kMatMulI8mm;

}  // namespace graphopt
