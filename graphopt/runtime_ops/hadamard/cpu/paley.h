// The product with a core of Paley's second construction over the integers modulo a prime q = 1 mod 4.
//
// Such a core is C (x) S(2) + I (x) [[1, -1], [-1, -1]]. C has 1 in its first row and column, chi(i - j) in the others
// and 0 on its diagonal. As -1 is a square, C takes what is even in j <-> -j to what is even and what is odd to what is
// odd: two halves of (q - 1) / 2 rows, and where one of them has 1 or -1 the other has 0, which halves the additions.
// Inputs in pairs have a sum and a difference that all outputs share, which saves a quarter of the rest. All this is
// known when this is compiled, so that what is added up stays in registers: a table of sums that outputs look up, as
// for any other core, takes longer to write and read than the additions do.
#pragma once

#include "hadamard/shared/character.h"
#include "hadamard/cpu/vector.h"

namespace graphopt {
namespace {

// Half of C, of rows and columns 1 .. (q - 1) / 2, without its diagonal; and which inputs are a pair.
template <size_t q, bool odd>
struct PaleyHalf {
  static constexpr size_t n = (q - 1) / 2;
  int8_t entry[n][n] = {};
  size_t paired[n] = {};

  constexpr PaleyHalf() {
    for (size_t k = 0; k < n; ++k) {
      for (size_t j = 0; j < n; ++j) {
        const int column = kCharacter<q>.of[(k + q - j) % q], mirror_column = kCharacter<q>.of[(k + j + 2) % q];
        entry[k][j] = static_cast<int8_t>(k == j ? 0 : (odd ? column - mirror_column : column + mirror_column) / 2);
      }
    }
    // The partner of each input that is still alone is the one with which it leaves most outputs as they are.
    bool has_partner[n] = {};
    for (size_t pair = 0; pair < n; pair += 2) {
      size_t first = 0, second = 0, fewest = n + 1;
      while (has_partner[first]) ++first;
      for (size_t j = first + 1; j < n; ++j) {
        size_t changes = 0;
        for (size_t k = 0; k < n; ++k) changes += entry[k][first] || entry[k][j];
        if (!has_partner[j] && changes < fewest) fewest = changes, second = j;
      }
      has_partner[first] = has_partner[second] = true;
      paired[pair] = first;
      paired[pair + 1] = second;
    }
  }
};

template <size_t q, bool odd>
constexpr PaleyHalf<q, odd> kPaleyHalf;

// A strip's columns. Every row of C is an upper and a lower row here: S(2)'s. Rows j and -j are there as their sums,
// the even half, and their differences, the odd one; the border and row 0 have no partner.
template <size_t q, typename V>
struct PaleyStrip {
  static constexpr size_t n = (q - 1) / 2;
  V upper[2][n], lower[2][n], upper_border, lower_border, upper_zero, lower_zero;
};

// Input j of C: for S(2)'s first column the sum of the two rows, for its second one their difference.
template <bool second, typename V>
[[gnu::always_inline]] inline V input(const V& upper, const V& lower) {
  return second ? upper - lower : upper + lower;
}

// What the diagonals give row k: those of this half of C and of I (x) [[1, -1], [-1, -1]], which add up to one row.
template <size_t q, bool odd, bool second, typename V>
[[gnu::always_inline]] inline V diagonal(const PaleyStrip<q, V>& in, size_t k) {
  const bool square = kCharacter<q>.of[2 * (k + 1) % q] > 0;
  const V &upper = in.upper[odd][k], &lower = in.lower[odd][k];
  if (odd) return second ? -(square ? upper : lower) : square ? -lower : upper;
  return second ? -(square ? lower : upper) : square ? upper : -lower;
}

// What inputs a and b give output k. Two additions of three are made by multiplying by one, which rounds the same:
// a processor has other units for it.
template <size_t q, bool odd, size_t k, size_t pair, typename V>
[[gnu::always_inline]] inline void add_pair(V& total, V a, V b, V sum, V difference, V one) {
  constexpr auto& half = kPaleyHalf<q, odd>;
  constexpr int of_a = half.entry[k][half.paired[2 * pair]], of_b = half.entry[k][half.paired[2 * pair + 1]];
  if constexpr (of_a || of_b) {
    const V term = !of_a ? b : !of_b ? a : of_a == of_b ? sum : difference;
    constexpr bool multiplied = (k + pair) % 3;
    if constexpr ((of_a ? of_a : of_b) > 0) total = multiplied ? plus_times(total, term, one) : total + term;
    else total = multiplied ? minus_times(total, term, one) : total - term;
  }
}

template <size_t q, bool odd, bool second, size_t first, size_t pair, typename V, size_t... k>
[[gnu::always_inline]] inline void add_to_all(V* totals, const PaleyStrip<q, V>& in, V one, std::index_sequence<k...>) {
  constexpr size_t i = kPaleyHalf<q, odd>.paired[2 * pair], j = kPaleyHalf<q, odd>.paired[2 * pair + 1];
  const V a = input<second>(in.upper[odd][i], in.lower[odd][i]), b = input<second>(in.upper[odd][j], in.lower[odd][j]);
  const V sum = a + b, difference = a - b;
  (add_pair<q, odd, first + k, pair>(totals[k], a, b, sum, difference, one), ...);
}

template <size_t q, bool odd, bool second, size_t first, typename V, typename Outputs, size_t... pair>
[[gnu::always_inline]] inline void add_all(V* totals, const PaleyStrip<q, V>& in, V one, Outputs outputs,
                                           std::index_sequence<pair...>) {
  (add_to_all<q, odd, second, first, pair>(totals, in, one, outputs), ...);
}

// `count` outputs of a half, from `first` on. The even half starts from what the border and row 0 give squares, or
// others; `even` keeps it until the odd one is there.
template <size_t q, bool odd, bool second, size_t first, size_t count, typename V, typename StoreRow>
[[gnu::always_inline]] inline void paley_outputs(const PaleyStrip<q, V>& strip, V* even, V one, V squares, V others,
                                                 StoreRow& store_row) {
  V totals[count];
#pragma GCC unroll 32
  for (size_t k = 0; k < count; ++k) {
    totals[k] = diagonal<q, odd, second>(strip, first + k);
    if (!odd) totals[k] += kCharacter<q>.of[first + k + 1] > 0 ? squares : others;
  }
  add_all<q, odd, second, first>(totals, strip, one, std::make_index_sequence<count>(),
                                 std::make_index_sequence<PaleyStrip<q, V>::n / 2>());
#pragma GCC unroll 32
  for (size_t k = 0; k < count; ++k) {
    if (odd) {
      store_row(2 * (first + k + 2) + second, even[first + k] + totals[k]);
      store_row(2 * (q - first - k) + second, even[first + k] - totals[k]);
    } else {
      even[first + k] = totals[k];
    }
  }
}

template <size_t q, bool odd, bool second, typename V, typename StoreRow, size_t... block>
[[gnu::always_inline]] inline void paley_blocks(const PaleyStrip<q, V>& strip, V* even, V one, V squares, V others,
                                                StoreRow& store_row, std::index_sequence<block...>) {
  constexpr size_t n = (q - 1) / 2, most = kPaleyTotals;
  (paley_outputs<q, odd, second, block * most, (n - block * most < most ? n - block * most : most)>(
       strip, even, one, squares, others, store_row),
   ...);
}

// Every other row of the result: those of S(2)'s first column, or of its second.
template <size_t q, bool second, typename V, typename StoreRow>
void paley_rows(const PaleyStrip<q, V>& strip, V* even, V one, StoreRow store_row) {
  constexpr size_t n = (q - 1) / 2, all = kPaleyTotals;
  const V border = input<second>(strip.upper_border, strip.lower_border);
  const V zero = input<second>(strip.upper_zero, strip.lower_zero);
  V squares = {}, others = {};
#pragma GCC unroll 64
  for (size_t j = 0; j < n; ++j) {
    (kCharacter<q>.of[j + 1] > 0 ? squares : others) += input<second>(strip.upper[0][j], strip.lower[0][j]);
  }
  // [[1, -1], [-1, -1]] takes them to their difference, and to their sum with a minus
  const V own_border = input<!second>(strip.upper_border, strip.lower_border);
  const V own_zero = input<!second>(strip.upper_zero, strip.lower_zero);
  store_row(0 + second, (second ? -own_border : own_border) + zero + (squares + others));
  store_row(2 + second, (second ? -own_zero : own_zero) + border + (squares - others));
  constexpr auto blocks = std::make_index_sequence<(n + all - 1) / all>();
  paley_blocks<q, false, second>(strip, even, one, border + zero, border - zero, store_row, blocks);
  paley_blocks<q, true, second>(strip, even, one, border, zero, store_row, blocks);
}

// Fills strips that lie side by side: `row(i, v)` reads row i of the core, a vector for each.
template <size_t q, size_t strips, typename V, typename Row>
[[gnu::always_inline]] inline void paley_read(PaleyStrip<q, V>* strip, Row row) {
  const auto read_one = [&](size_t i, V PaleyStrip<q, V>::*where) {
    V v[strips];
    row(i, v);
    for (size_t s = 0; s < strips; ++s) strip[s].*where = v[s];
  };
  read_one(0, &PaleyStrip<q, V>::upper_border);
  read_one(1, &PaleyStrip<q, V>::lower_border);
  read_one(2, &PaleyStrip<q, V>::upper_zero);
  read_one(3, &PaleyStrip<q, V>::lower_zero);
  const auto read_pair = [&](size_t i, size_t j, V (PaleyStrip<q, V>::*where)[2][(q - 1) / 2]) {
    V v[strips], partner[strips];
    row(i, v);
    row(2 * q + 4 + i % 2 * 2 - i, partner);
    for (size_t s = 0; s < strips; ++s) {
      (strip[s].*where)[0][j] = v[s] + partner[s];
      (strip[s].*where)[1][j] = v[s] - partner[s];
    }
  };
  for (size_t j = 0; j < (q - 1) / 2; ++j) {
    read_pair(4 + 2 * j, j, &PaleyStrip<q, V>::upper);
    read_pair(5 + 2 * j, j, &PaleyStrip<q, V>::lower);
  }
}

// The product of a strip's columns with the core: `store_row(row, v)` takes the result, in no order. `even` is room for
// half of C's rows.
template <size_t q, typename V, typename StoreRow>
void paley_product(const PaleyStrip<q, V>& strip, V* even, StoreRow store_row) {
  const V one = ones<V>();
  paley_rows<q, false>(strip, even, one, store_row);
  paley_rows<q, true>(strip, even, one, store_row);
}

}  // namespace
}  // namespace graphopt
