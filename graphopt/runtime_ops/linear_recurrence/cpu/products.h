// Products of small matrices of floats, in tiles of rows by lines whose sums stay in registers.
#pragma once

#include <type_traits>

#include "linear_recurrence/cpu/vectors.h"

namespace graphopt {
namespace {

// Rows and lines of the largest tile. With registers of 32 bytes 6 by 1 takes 12 of the 16, and 8 loads for 12
// multiplications.
constexpr size_t kTileRows = kParts == 1 ? 8 : kParts == 2 ? 6 : 4, kTileLines = kParts == 1 ? 2 : 1;

// Lines that are fetched while products are computed, some with each tile: each of them `step` numbers behind the one
// before, of two tensors at once.
struct Ahead {
  const float *first = nullptr, *second = nullptr;
  size_t step = 0, lines = 0;

  GRAPHOPT_FORCE_INLINE void fetch() {
    for (size_t i = 0; lines && i < 6; ++i, --lines) {
      __builtin_prefetch(first, 0, 2), __builtin_prefetch(second, 0, 2);
      first += step, second += step;
    }
  }
};

// sums += A B for a tile of A's rows, whose rows and columns are so far apart, as are rows of B: most often numbers that
// the compiler knows.
template <size_t Rows, size_t Lines>
GRAPHOPT_FORCE_INLINE void add_product(const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row,
                                       size_t depth, Floats (&sums)[Rows][Lines]) {
  const auto add = [&](size_t k) __attribute__((always_inline)) {
    Floats lines[Lines];
#pragma GCC unroll 4
    for (size_t j = 0; j < Lines; ++j) lines[j] = load_line<Floats>(b + k * b_row + j * kColumns);
#pragma GCC unroll 8
    for (size_t i = 0; i < Rows; ++i) {
      const Floats factor = all_lanes(a[i * a_row + k * a_column]);
#pragma GCC unroll 4
      for (size_t j = 0; j < Lines; ++j) sums[i][j] = fused(factor, lines[j], sums[i][j]);
    }
  };
  for (; depth >= 4; depth -= 4, a += 4 * a_column, b += 4 * b_row) {
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) add(k);
  }
  for (size_t k = 0; k < depth; ++k) add(k);
}

template <size_t Rows, typename Tile>
GRAPHOPT_FORCE_INLINE void call_with_rows(size_t rows, size_t first, const Tile& tile) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return call_with_rows<Rows - 1>(rows, first, tile);
  }
  tile(std::integral_constant<size_t, Rows>(), first);
}

// Cuts rows into tiles, all of them of nearly the same size, and calls tile(size as a type, first row) for each.
template <typename Tile>
GRAPHOPT_FORCE_INLINE void by_tiles(size_t rows, const Tile& tile) {
  const size_t tiles = (rows + kTileRows - 1) / kTileRows;
  if (!tiles) return;
  const size_t size = rows / tiles, longer = rows % tiles;
  for (size_t i = 0, first = 0; i < tiles; ++i) {
    const size_t of_tile = size + (i < longer);
    call_with_rows<kTileRows>(of_tile, first, tile);
    first += of_tile;
  }
}

// Calls to(row of the tile, row, line) for each line of a tile whose rows begin at `first`.
template <size_t Rows, size_t Lines, typename To>
GRAPHOPT_FORCE_INLINE void for_lines(const Floats (&)[Rows][Lines], size_t first, const To& to) {
#pragma GCC unroll 8
  for (size_t i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < Lines; ++j) to(i, first + i, j);
  }
}

// U := U + L U row by row, where L [rows, rows] has numbers below its diagonal alone: what (1 - L)^-1 does to U. Rows are a
// multiple of 8, those of L a line. store(row, line, numbers) stores a line of U, where it lies and where else it has to be.
template <size_t Lines, typename Store>
GRAPHOPT_FORCE_INLINE void solve(const float* lower, float* u, size_t rows, const Store& store) {
  constexpr size_t kRows = kParts == 1 ? 8 : 4, kRow = Lines * kColumns;
  for (size_t first = 0; first < rows; first += kRows) {
    const float* const of_block = lower + first * kColumns;
    Floats x[kRows][Lines];
    for_lines(x, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
      x[i][j] = load_line<Floats>(u + row * kRow + j * kColumns);
    });
    add_product(of_block, kColumns, 1, u, kRow, first, x);
#pragma GCC unroll 8
    for (size_t i = 1; i < kRows; ++i) {
#pragma GCC unroll 8
      for (size_t other = 0; other < i; ++other) {
        const Floats factor = all_lanes(of_block[i * kColumns + first + other]);
#pragma GCC unroll 4
        for (size_t j = 0; j < Lines; ++j) x[i][j] = fused(factor, x[other][j], x[i][j]);
      }
    }
    for_lines(x, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
      store(row, j, x[i][j]);
    });
  }
}

}  // namespace
}  // namespace graphopt
