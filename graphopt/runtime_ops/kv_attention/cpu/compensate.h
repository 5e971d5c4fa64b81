// One token that replaces those that streaming dropped: their mean key and value, with log N added to its score. It is
// kept as a running mean in the summaries of their pages.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// Brings the mean up to date by the token at `position`; `summaries` are those of its head.
inline void follow(const Layout& layout, const float* key, const float* value, int64_t position, float* summaries) {
  const int64_t page = layout.page_of(position), count = position - layout.sinks + 1;
  const auto mean_of = [&](int64_t logical) {
    return summaries + layout.physical(logical) * layout.summary + layout.known;
  };
  // a page begins with the mean of the one before
  const int64_t before = page * static_cast<int64_t>(layout.page) == position ? page - 1 : page;
  float* const to = mean_of(page);
  const float* const from = count == 1 ? nullptr : mean_of(before);
  const Floats all = all_lanes(static_cast<float>(count));
  for (size_t part = 0; part < 2; ++part) {
    const float* const token = part ? value : key;
    for (size_t c = 0; c < layout.size; c += kColumns) {
      Floats mean = load_line<Floats>(token + c);
      const size_t at = part * layout.size + c;
      if (from) mean = load_line<Floats>(from + at) + (mean - load_line<Floats>(from + at)) / all;
      store_line(to + at, mean);
    }
  }
}

// The token that replaces what the query of a column dropped.
struct Dropped {
  const float* mean = nullptr;  // key and value; null where no page was dropped whole
  float logarithm = 0;          // of the number of tokens

  Dropped(const Attention& call, const Queries& queries, size_t column) {
    const Layout& layout = call.layout;
    if (!layout.compensate || !may_drop(call.policies[queries.head])) return;
    const int64_t from = call.position(queries.row, column) - layout.recent + 1;
    if (from <= 0) return;
    const int64_t end = layout.page_of(from), count = end * static_cast<int64_t>(layout.page) - layout.sinks;
    if (count <= 0) return;
    const HeadState state(layout, call.state, queries.row, queries.head);
    mean = state.summaries + layout.physical(end - 1) * layout.summary + layout.known;
    logarithm = static_cast<float>(__builtin_log(static_cast<double>(count)));
  }

  // Of a query of `size` numbers; NaN if any of them is not finite.
  float score(const Layout& layout, const float* query) const {
    Floats sums = all_lanes(0.f);
    for (size_t c = 0; c < layout.size; c += kColumns) {
      sums = fused(load_line<Floats>(query + c) * layout.scale, load_line<Floats>(mean + c), sums);
    }
    const float sum = sum_of(sums);
    float lanes[kColumns] = {sum + (sum - sum)};
    if (layout.softcap != 0) {
      store_line(lanes, hyperbolic_tangent(all_lanes(lanes[0]) / all_lanes(layout.softcap)) * layout.softcap);
    }
    return lanes[0] + logarithm;
  }
};

}  // namespace
}  // namespace graphopt
