// Products of queries with the keys of a page, and of weights with its values, in floats.
#pragma once

#include <type_traits>

#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/float8.h"
#include "kv_attention/cpu/numbers.h"
#include "kv_attention/cpu/scaled.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, loads.h)

namespace graphopt {
namespace {

inline Floats load_numbers(const float* from) { return load_line<Floats>(from); }
inline Floats load_numbers(const Half* from) { return load_halves(from); }

// Number `n` of a page, a multiple of 16, and the 16 from there on; codes of 4 bits have functions of their own.
template <typename Stored>
inline const Stored* number_at(const Stored* from, size_t n) {
  return from + n;
}
template <typename Stored>
inline Floats load_numbers(const Stored* from, size_t n) {
  return load_numbers(from + n);
}

// Groups of 16 numbers in a line.
template <typename Stored>
constexpr size_t kPerLine = kLine / (kColumns * sizeof(Stored));

// Loads `Count` of them, from number `n` on.
template <typename Stored, size_t Count>
inline void load_numbers(const Stored* from, size_t n, Floats (&numbers)[Count]) {
#pragma GCC unroll 4
  for (size_t i = 0; i < Count; ++i) numbers[i] = load_numbers(from, n + i * kColumns);
}

constexpr size_t kMostLines = 4;
// Numbers of float8 take registers while they are decoded.
template <typename Stored>
constexpr size_t kRowsTogether = sizeof(Stored) == 1 && kMostTogether > 4 ? 4 : kMostTogether;

// Calls with_count(row, count) for runs of rows, with counts that the compiler knows.
template <size_t Most = kMostTogether, typename WithCount>
inline void for_rows(size_t rows, const WithCount& with_count, size_t row = 0) {
  for (; row + Most <= rows; row += Most) with_count(row, std::integral_constant<size_t, Most>());
  if constexpr (Most > 1) {
    if (row < rows) for_rows<Most / 2>(rows, with_count, row);
  }
}

// Lines that go together with `Rows` rows.
template <size_t Rows>
constexpr size_t lines_for = kSumLines / Rows < kMostLines ? kSumLines / Rows : kMostLines;

// Rows whose lines are read in the order of memory.
template <typename Stored>
constexpr size_t kRowsInOrder = sizeof(Stored) == sizeof(float) ? kFloatRowsInOrder : 0;
constexpr size_t kTokensInOrder = 16;  // whose values the first cache holds, for rows that do not fit in registers

// Prefetches the line of the next page at the offset that `at` has in this one. Pages are short, so the processor's own
// prefetching comes too late for most of them. Goes to L2, where many more lines can be in flight.
template <typename Stored>
inline void prefetch_line(const Stored* at, ptrdiff_t to_next) {
  const uintptr_t next = reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(to_next);
  __builtin_prefetch(reinterpret_cast<const char*>(next), 0, 2);
}

// The lines of the page that is read next, prefetched one by one while this page is processed: requested all at once
// they would queue, and delay everything else.
class Ahead {
 public:
  // What is left of the bytes that are prefetched now. Loops hold it in registers.
  struct Run {
    const char *at = nullptr, *end = nullptr;
  };
  Run run;

  void add(const void* from, size_t bytes) {
    const char* const at = static_cast<const char*>(from);
    runs_[count_++] = {at, at + (bytes + kLine - 1) / kLine * kLine};  // whole lines: a run has an end that it meets
  }
  void ask(Run* now) {
    if (__builtin_expect(now->at == now->end, 0)) {
      if (next_ == count_) return;
      *now = runs_[next_++];
    }
    prefetch_line(now->at, 0);
    now->at += kLine;
  }
  void ask() { ask(&run); }
  void ask_all() {
    do ask();
    while (run.at != run.end || next_ != count_);
  }

 private:
  Run runs_[3];
  size_t count_ = 0, next_ = 0;
};

template <size_t Rows, size_t Lines, typename Stored>
inline void multiply_keys(const float* queries, const Stored* keys, ptrdiff_t to_next, size_t size, size_t page,
                          float* scores) {
  Floats sums[Rows][Lines] = {};
  constexpr size_t kChannels = kPerLine<Stored>;
  for (size_t c = 0; c < size; c += kChannels) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      const size_t n = (i * size + c) * kColumns;
      Floats line[kChannels];
      load_numbers(keys, n, line);
      prefetch_line(number_at(keys, n), to_next);
#pragma GCC unroll 8
      for (size_t k = 0; k < kChannels; ++k) {
#pragma GCC unroll 8
        for (size_t r = 0; r < Rows; ++r) sums[r][i] = fused(line[k], all_lanes(queries[r * size + c + k]), sums[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) store_line(scores + r * page + i * kColumns, sums[r][i]);
  }
}

// Scores [rows, page] of the first 16 * `lines` tokens of a page, whose keys are [page / 16, size, 16]; the page that
// comes next lies `to_next` bytes behind this one.
template <typename Stored>
void multiply_keys(const float* queries, size_t rows, const Stored* keys, ptrdiff_t to_next, size_t size, size_t lines,
                   size_t page, float* scores) {
  for (size_t line = 0; line < lines;) {
    const size_t together = lines - line < kMostLines ? lines - line : kMostLines;
    for_rows<kRowsTogether<Stored>>(rows, [&](size_t row, auto count) {
      constexpr size_t kRows = decltype(count)::value;
      constexpr size_t kLines = kRows <= kRowsInOrder<Stored> ? 1 : lines_for<kRows>;
      size_t i = line;
      const auto run = [&](auto width) {
        multiply_keys<kRows, decltype(width)::value>(queries + row * size, number_at(keys, i * size * kColumns), to_next,
                                                     size, page, scores + row * page + i * kColumns);
        i += decltype(width)::value;
      };
      while (i + kLines <= line + together) run(std::integral_constant<size_t, kLines>());
      while (i < line + together) run(std::integral_constant<size_t, 1>());
    });
    line += together;
  }
}

// Tokens that lie side by side: keys and values and, where they have some, their scales. The page that comes next has the
// like of them `to_next` bytes behind.
template <typename Keys, typename Values>
struct Stretch {
  const Keys* keys;
  const Values* values;
  const float *key_scales, *value_scales;
  ptrdiff_t to_next;
};

// Of the channels from `begin` on; `first` is in the first run, each of which has `tokens` tokens.
template <size_t Rows, size_t Lines, typename Keys, typename Stored>
inline void multiply_values(const float* weights, const float* factors, const Stretch<Keys, Stored>* runs, size_t tokens,
                            size_t begin, size_t size, size_t page, size_t first, size_t end, float* sums) {
  Floats sum[Rows][Lines] = {};
  constexpr size_t kTogether = Lines % kPerLine<Stored> ? 1 : kPerLine<Stored>;
  for (size_t before = 0; before < end; before += tokens, first = 0, ++runs) {
    const size_t to = end - before < tokens ? end - before : tokens;
    for (size_t t = first; t < to; ++t) {
      Floats line[Lines / kTogether][kTogether];
#pragma GCC unroll 8
      for (size_t i = 0; i < Lines / kTogether; ++i) {
        const size_t n = t * size + begin + i * kTogether * kColumns;
        load_numbers(runs->values, n, line[i]);
        prefetch_line(number_at(runs->values, n), runs->to_next);
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const Floats p = all_lanes(weights[r * page + before + t]);
#pragma GCC unroll 8
        for (size_t i = 0; i < Lines; ++i) sum[r][i] = fused(line[i / kTogether][i % kTogether], p, sum[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      float* const to = sums + r * size + begin + i * kColumns;
      store_line(to, fused(load_line<Floats>(to), all_lanes(factors[r]), sum[r][i]));
    }
  }
}

// The same for `rows` rows, `Rows` and `Lines` at a time, or as many lines as registers hold for 0, and any first token.
template <size_t Rows, size_t Lines, typename Keys, typename Stored>
inline void multiply_values(const float* weights, const float* factors, size_t rows, const Stretch<Keys, Stored>* runs,
                            size_t tokens, size_t size, size_t page, size_t first, size_t end, float* sums) {
  const size_t before = first / tokens * tokens;
  runs += first / tokens, weights += before, first -= before, end -= before;
  for_rows<Rows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    constexpr size_t kLines = Lines ? Lines : lines_for<kRows>;
    size_t i = 0;
    const auto run = [&](auto width) {
      multiply_values<kRows, decltype(width)::value>(weights + row * page, factors + row, runs, tokens, i * kColumns,
                                                     size, page, first, end, sums + row * size);
      i += decltype(width)::value;
    };
    const size_t lines = size / kColumns;
    while (i + kLines <= lines) run(std::integral_constant<size_t, kLines>());
    while (i < lines) run(std::integral_constant<size_t, 1>());
  });
}

// sums [rows, size] = sums * factors [rows] + weights [rows, page] times values [page, size] in runs of `tokens`, of
// tokens first..end; factors become 1. A page is summed up by itself first, or `in_order` a part of it, so that many
// tokens round little.
template <typename Keys, typename Stored>
void multiply_values(const float* weights, float* factors, size_t rows, bool in_order, const Stretch<Keys, Stored>* runs,
                     size_t tokens, size_t size, size_t page, size_t first, size_t end, float* sums) {
  const auto run = [&](auto together, auto lines, size_t from, size_t to) {
    multiply_values<decltype(together)::value, decltype(lines)::value>(weights, factors, rows, runs, tokens, size,
                                                                       page, from, to, sums);
    for (size_t r = 0; r < rows; ++r) factors[r] = 1;
  };
  if (!in_order) {
    run(std::integral_constant<size_t, kRowsTogether<Stored>>(), std::integral_constant<size_t, 0>(), first, end);
    return;
  }
  for (size_t token = first; token < end; token += kTokensInOrder) {
    const size_t to = end - token < kTokensInOrder ? end : token + kTokensInOrder;
    run(std::integral_constant<size_t, 2>(), std::integral_constant<size_t, kSumLines / 2>(), token, to);
  }
}

}  // namespace
}  // namespace graphopt
