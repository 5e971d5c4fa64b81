// Scores of pages from their summaries: a bound of the products with the keys of a page, or the product with their mean.
#pragma once

#include "kv_attention/cpu.h"
#include "kv_attention/products.h"

namespace graphopt {
namespace {

// The largest score of `Rows` queries; what is no number counts as infinite.
template <bool Mean, size_t Rows>
inline float score_page(const float* queries, const float* summary, size_t size) {
  Floats sums[Rows] = {};
  for (size_t c = 0; c < size; c += kColumns) {
    const Floats low = load_line<Floats>(summary + c);
    const Floats high = Mean ? low : load_line<Floats>(summary + size + c);
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const Floats q = load_line<Floats>(queries + r * size + c);
      if constexpr (Mean) {
        sums[r] = fused(q, low, sums[r]);
      } else {
        const Floats a = q * low, b = q * high;
        sums[r] = sums[r] + by_parts<Floats>([&](size_t i) {  // what is no number stays
          const auto most = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
          return a.part[i] != a.part[i] ? a.part[i] : most;
        });
      }
    }
  }
  float most = kNothing;
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
    const float sum = sum_of(sums[r]);
    const float counted = sum != sum ? __builtin_inff() : sum;
    most = counted > most ? counted : most;
  }
  return most;
}

template <bool Mean>
void score_pages(const Attention& call, size_t row, size_t head, size_t column, int64_t first, int64_t end, float* scores) {
  const Layout& layout = call.layout;
  const HeadState state(layout, call.state, row, head);
  const float* const queries =
      call.query + ((row * call.columns + column) * layout.kv_heads + head) * layout.group * layout.size;
  const float* summary = state.summaries + static_cast<size_t>(first) * layout.summary;
  for (int64_t page = first; page < end; ++page, summary += layout.summary) {
    float most = kNothing;
    for_rows<kMostTogether>(layout.group, [&](size_t r, auto count) {
      const float found = score_page<Mean, decltype(count)::value>(queries + r * layout.size, summary, layout.size);
      most = found > most ? found : most;
    });
    scores[page - first] = most;
  }
}

void score(const Attention& call, size_t row, size_t head, size_t column, int64_t first, int64_t end, float* scores) {
  if (call.layout.mean) return score_pages<true>(call, row, head, column, first, end, scores);
  score_pages<false>(call, row, head, column, first, end, scores);
}

}  // namespace
}  // namespace graphopt
