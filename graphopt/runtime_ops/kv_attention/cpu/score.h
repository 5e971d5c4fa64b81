// Scores of pages from their summaries: a bound of the products with the keys of a page, or the product with their
// mean.
#pragma once

#include "kv_attention/cpu/channels.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

// Lines between a summary that is read and the one that is prefetched.
constexpr size_t kAhead = 64;

// The positive and the negative parts of some queries: q times the bound that makes the larger product is the sum of
// positive * high and negative * low, of which one is 0.
struct Signed {
  static constexpr size_t kMost = 256;
  alignas(kLine) float positive[kMostTogether * kMost], negative[kMostTogether * kMost];

  GRAPHOPT_INLINE Signed(const float* queries, size_t count) {
    for (size_t i = 0; i < count; i += kColumns) {
      const Floats q = load_line<Floats>(queries + i), zero = all_lanes(0.f);
      store_line(positive + i, larger(zero, q)), store_line(negative + i, smaller(zero, q));
    }
  }
};

// The score of one query by the definition: NaN propagates, and only the given channels count, if any are given.
template <bool Mean>
inline float exact_score(const float* query, const float* summary, size_t size, const Channels* channels) {
  Floats sum = all_lanes(0.f);
  for (size_t c = 0; c < size; c += kColumns) {
    const Floats q = load_line<Floats>(query + c);
    const Floats a = q * load_line<Floats>(summary + c);
    const Floats b = Mean ? a : q * load_line<Floats>(summary + size + c);
    const Floats products = by_parts<Floats>([&](size_t i) {
      const auto most = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
      return a.part[i] != a.part[i] ? a.part[i] : most;
    });
    sum = sum + (channels ? channels->only(c, products) : products);
  }
  return sum_of(sum);
}

// Scores of `Pages` pages for `Rows` queries, [query][page].
template <bool Mean, size_t Rows, size_t Pages>
inline void score_block(const float* queries, const Signed& parts, const float* summary, size_t stride, size_t size,
                        float* scores) {
  Floats sums[kColumns] = {};
  const auto add = [&](const float* factors, const float* numbers, size_t p) __attribute__((always_inline)) {
    for (size_t c = 0; c < size; c += kColumns) {
      const Floats line = load_line<Floats>(numbers + c);
      prefetch_line(numbers + c, kAhead * kLine);
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        sums[r * Pages + p] = fused(load_line<Floats>(factors + r * size + c), line, sums[r * Pages + p]);
      }
    }
  };
  // Summaries go by as they lie in memory: a processor that sees several places read in turns foresees none of them.
#pragma GCC unroll 4
  for (size_t p = 0; p < Pages; ++p) {
    const float* const at = summary + p * stride;
    add(Mean ? queries : parts.negative, at, p);
    if (!Mean) add(parts.positive, at + size, p);
  }
  if constexpr (Rows * Pages == kColumns) {
    store_line(scores, sums_of(sums));
  } else {
    for (size_t i = 0; i < Rows * Pages; ++i) scores[i] = sum_of(sums[i]);
  }
}

// NaN counts as infinite.
inline void keep_larger(float score, float* most) {
  const float counted = score != score ? __builtin_inff() : score;
  *most = counted > *most ? counted : *most;
}

template <bool Mean>
void score_pages(const Attention& call, const HeadState& state, const float* all, const Channels* channels,
                 int64_t first, int64_t end, float* scores) {
  const Layout& layout = call.layout;
  const size_t size = layout.size, pages = static_cast<size_t>(end - first), stride = layout.summary;
  const float* const summaries = state.summaries + static_cast<size_t>(first) * stride;
  for (size_t page = 0; page < pages; ++page) scores[page] = kNothing;
  for_rows(layout.group, [&](size_t r, auto count) {
    constexpr size_t kRows = decltype(count)::value, kPages = lines_for<kRows>;
    const float* queries = all + r * size;
    alignas(kLine) float kept[kRows * Signed::kMost];
    if (channels) {
      channels->keep(queries, kRows, size, kept);
      queries = kept;
    }
    const Signed parts(queries, Mean ? 0 : kRows * size);
    size_t page = 0;
    const auto run = [&](auto width) {
      constexpr size_t kWidth = decltype(width)::value;
      const float* const summary = summaries + page * stride;
      float found[kRows * kWidth];
      score_block<Mean, kRows, kWidth>(queries, parts, summary, stride, size, found);
      for (size_t i = 0; i < kRows * kWidth; ++i) {
        const size_t p = i % kWidth;
        // 0 times infinity is NaN: there the definition decides
        if ((!Mean || channels) && found[i] - found[i] != 0) {
          found[i] = exact_score<Mean>(queries + i / kWidth * size, summary + p * stride, size, channels);
        }
        keep_larger(found[i], scores + page + p);
      }
      page += kWidth;
    };
    while (page + kPages <= pages) run(std::integral_constant<size_t, kPages>());
    while (page < pages) run(std::integral_constant<size_t, 1>());
  });
}

inline void score_candidates(const Attention& call, size_t row, size_t head, size_t column, int64_t first, int64_t end, float* scores) {
  const Layout& layout = call.layout;
  const HeadState state(layout, call.state, row, head);
  const size_t group = call.token(row, column) * layout.kv_heads + head;
  const float* const queries = call.query + group * layout.group * layout.size;
  const auto run = [&](const Channels* channels) {
    if (layout.mean) return score_pages<true>(call, state, queries, channels, first, end, scores);
    score_pages<false>(call, state, queries, channels, first, end, scores);
  };
  if (!layout.channels) return run(nullptr);
  const Channels used(queries, layout.group, layout.size, static_cast<size_t>(layout.channels));
  run(&used);
}

}  // namespace
}  // namespace graphopt
