// Products with codes of integers, for sets that have instructions for them (arch/<set>/codes.h).
#pragma once

#include "kv_attention/cpu/decode_keys.h"
#include "kv_attention/cpu/factors.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/planes.h"
#include "kv_attention/cpu/products.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, codes.h)

namespace graphopt {
namespace {

constexpr bool kMultiplyCodes = true;

// Products of `Rows` rows of factors with `Lines` lines of 16 numbers each, whose codes are [line][unit][lines of a unit][16][4].
template <unsigned Bits, size_t Rows, size_t Lines>
__attribute__((noinline)) void multiply_codes(const Factors<Rows>& factors, const uint8_t* codes, Ahead& ahead,
                                              size_t count, Floats (&products)[Rows][Lines]) {
  using Of = Planes<Bits>;
  const size_t units = count / Of::kCodes, to_line = units * Of::kBytes;
  Ahead::Run next_run = ahead.run;
  CodeSums<Bits, Rows, Lines> sums;
  for (size_t unit = 0; unit < units; ++unit, codes += Of::kBytes) {
#pragma GCC unroll 6
    for (size_t i = 0; i < Lines * Of::kLines; ++i) ahead.ask(&next_run);
    sums.add(factors, codes, to_line, unit);
  }
  ahead.run = next_run;
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) {
      products[r][i] = sums.of(r, i) * factors.steps[r] + all_lanes(factors.offsets[r]);
    }
  }
}

// The same for any number of lines; finish(row, line, product) takes them.
template <unsigned Bits, size_t Rows, typename Finish>
inline void multiply_lines(const Factors<Rows>& factors, const uint8_t* codes, Ahead& ahead, size_t count, size_t lines,
                           const Finish& finish) {
  size_t line = 0;
  const auto run = [&](auto width) {
    constexpr size_t kLines = decltype(width)::value;
    Floats products[Rows][kLines];
    multiply_codes<Bits, Rows, kLines>(factors, codes + line * (count * kColumns * Bits / 8), ahead, count,
                                         products);
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (size_t i = 0; i < kLines; ++i) finish(r, line + i, products[r][i]);
    }
    line += kLines;
  };
  while (line + kCodeLines <= lines) run(std::integral_constant<size_t, kCodeLines>());
  if (line < lines) run(std::integral_constant<size_t, 1>());
}

// Scores [rows, page] of a page of codes.
template <unsigned Bits>
void multiply_key_codes(const float* queries, size_t rows, const uint8_t* codes, Ahead& ahead,
                        const Half* scales, size_t size, size_t page, float* scores) {
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors<kRows> factors;
    const auto query = [&](size_t r, size_t i) { return load_line<Floats>(queries + (row + r) * size + i); };
    factors.round(size, query, [&](size_t i, Floats* low, Floats* step) {
      for (size_t r = 0; r < kRows; ++r) ahead.ask();
      *low = load_halves(scales + i), *step = load_halves(scales + size + i);
    });
    multiply_lines<Bits>(factors, codes, ahead, size, page / kColumns, [&](size_t r, size_t line, const Floats& x) {
      store_line(scores + (row + r) * page + line * kColumns, x);
    });
  });
}

// sums = sums * factors + weights times the values of a page of codes; invisible tokens have weight 0.
template <unsigned Bits>
void multiply_value_codes(const float* weights, const float* before, size_t rows, const uint8_t* codes, Ahead& ahead,
                          const Half* scales, const Visible& seen, size_t size, size_t page, float* sums) {
  const bool all = seen.all(page);
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors<kRows> factors;
    const auto weight = [&](size_t r, size_t i) { return load_line<Floats>(weights + (row + r) * page + i); };
    factors.round(page, weight, [&](size_t i, Floats* low, Floats* step) {
      for (size_t r = 0; r < kRows; ++r) ahead.ask();
      *low = load_halves(scales + i), *step = load_halves(scales + page + i);
      if (!all) {  // 0 times NaN is NaN
        const Integers mask = visible_lanes(seen, i);
        *low = choose(mask, *low, all_lanes(0.f)), *step = choose(mask, *step, all_lanes(0.f));
      }
    });
    multiply_lines<Bits>(factors, codes, ahead, page, size / kColumns, [&](size_t r, size_t line, const Floats& x) {
      float* const to = sums + (row + r) * size + line * kColumns;
      store_line(to, fused(load_line<Floats>(to), all_lanes(before[row + r]), x));
    });
  });
}

// The products of weights with the values of a page, whose codes may have other bits than those of keys.
template <typename Reader>
__attribute__((noinline)) void read_value_codes(const Reader& reader, bool alike, const uint8_t* values, const Half* scales, Ahead ahead) {
  const size_t size = reader.layout.size, page = reader.layout.page;
  with_codes(reader.layout.value_storage, [&](auto holds) {
    reader.by_columns(alike, [&](size_t row, size_t count, const Visible& seen) {
      multiply_value_codes<bits_of(holds)>(reader.buffers.scores + row * page, reader.buffers.factors + row, count, values,
                                           ahead, scales, seen, size, page, reader.partial.values + row * size);
    });
  });
}

// Reads a page of codes, of keys that have so many bits: the products are of integers.
template <unsigned Bits, typename Reader>
inline void read_codes(const Reader& reader, int64_t logical, bool alike, const uint8_t* keys, const uint8_t* values,
                       const Half* scales, Ahead ahead) {
  const size_t size = reader.layout.size, page = reader.layout.page, lines = page / kColumns;
  reader.score(logical, lines, [&](const float* from, float* scores) {
    multiply_key_codes<Bits>(from, reader.rows, keys, ahead, scales, size, page, scores);
    float factors[kMostPage];
    reader.scale(load_factors(reader.layout, scales, factors), lines, scores);
  });
  if (reader.takes_scores(logical, lines)) return;
  reader.weigh_rows(logical, alike, lines);
  read_value_codes(reader, alike, values, scales + 2 * size, ahead);
}

}  // namespace
}  // namespace graphopt
