// Products of small matrices of floats: C = A B, or added to another one, where rows of B and C are whole lines.
#pragma once

#include "linear_recurrence/cpu/vectors.h"

namespace graphopt {
namespace {

// Lines of memory that are fetched while a product is computed: what is read soon, and what is written soon.
struct Ahead {
  const float *read = nullptr, *written = nullptr;
  size_t lines = 0;

  void fetch() {
    if (!lines) return;
    __builtin_prefetch(read), __builtin_prefetch(written, 1);
    read += kColumns, written += kColumns, --lines;
  }
};

struct Product {
  const float* a;
  size_t a_row, a_column;  // how far apart its rows and columns are
  const float* b;
  size_t b_row;
  float* c;
  size_t c_row;
  size_t rows, lines, depth;
  const float* to;       // A B is added to this, whose rows lie like those of C; null for zeros
  const float* factors;  // of its rows; null for all 1
  bool lower;            // A has zeros above its diagonal
  bool square;           // of C, only what is up to its diagonal is wanted
  Ahead* ahead = nullptr;
};

// Sums that stay in registers: rows by lines.
constexpr size_t kTileRows = kParts == 1 ? 8 : 4, kTileLines = kParts == 1 ? 2 : 1;

template <size_t Rows, size_t Lines>
inline void multiply_tile(const Product& p, size_t row, size_t line) {
  const float *a = p.a + row * p.a_row, *b = p.b + line * kColumns;
  float* const c = p.c + row * p.c_row + line * kColumns;
  const size_t depth = p.lower && row + Rows < p.depth ? row + Rows : p.depth;
  Floats sums[Rows][Lines];
#pragma GCC unroll 8
  for (size_t i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < Lines; ++j) {
      sums[i][j] = p.to ? load_line<Floats>(p.to + (row + i) * p.c_row + (line + j) * kColumns) : all_lanes(0.f);
      if (p.factors) sums[i][j] = sums[i][j] * p.factors[row + i];
    }
  }
  Ahead none;
  Ahead& ahead = p.ahead ? *p.ahead : none;
  for (size_t k = 0; k < depth; ++k, a += p.a_column, b += p.b_row) {
    ahead.fetch();
    Floats lines[Lines];
#pragma GCC unroll 4
    for (size_t j = 0; j < Lines; ++j) lines[j] = load_line<Floats>(b + j * kColumns);
#pragma GCC unroll 8
    for (size_t i = 0; i < Rows; ++i) {
      const Floats factor = all_lanes(a[i * p.a_row]);
#pragma GCC unroll 4
      for (size_t j = 0; j < Lines; ++j) sums[i][j] = fused(factor, lines[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < Lines; ++j) store_line(c + i * p.c_row + j * kColumns, sums[i][j]);
  }
}

template <size_t Lines>
inline void multiply_lines(const Product& p, size_t line) {
  size_t row = p.square ? line * kColumns : 0;
  for (; row + kTileRows <= p.rows; row += kTileRows) multiply_tile<kTileRows, Lines>(p, row, line);
  if (kTileRows == 8 && row + 4 <= p.rows) {
    multiply_tile<4, Lines>(p, row, line);
    row += 4;
  }
  for (; row + 2 <= p.rows; row += 2) multiply_tile<2, Lines>(p, row, line);
  if (row < p.rows) multiply_tile<1, Lines>(p, row, line);
}

inline void multiply(const Product& p) {
  size_t line = 0;
  for (; line + kTileLines <= p.lines; line += kTileLines) multiply_lines<kTileLines>(p, line);
  for (; line < p.lines; ++line) multiply_lines<1>(p, line);
}

// U := U + L U row by row, where L [rows, rows] has numbers below its diagonal alone: what (1 - L)^-1 does to U. Rows are
// a multiple of 8.
inline void solve(const float* lower, size_t lower_row, float* u, size_t u_row, size_t rows, size_t lines) {
  constexpr size_t kRows = 8;
  for (size_t first = 0; first < rows; first += kRows) {
    const float* const of_block = lower + first * lower_row;
    if (first) {
      float* const rest = u + first * u_row;
      multiply({of_block, lower_row, 1, u, u_row, rest, u_row, kRows, lines, first, rest, nullptr, false, false});
    }
    for (size_t line = 0; line < lines; ++line) {
      Floats x[kRows];
#pragma GCC unroll 8
      for (size_t i = 0; i < kRows; ++i) x[i] = load_line<Floats>(u + (first + i) * u_row + line * kColumns);
#pragma GCC unroll 8
      for (size_t i = 1; i < kRows; ++i) {
#pragma GCC unroll 8
        for (size_t j = 0; j < i; ++j) x[i] = fused(all_lanes(of_block[i * lower_row + first + j]), x[j], x[i]);
      }
#pragma GCC unroll 8
      for (size_t i = 1; i < kRows; ++i) store_line(u + (first + i) * u_row + line * kColumns, x[i]);
    }
  }
}

}  // namespace
}  // namespace graphopt
