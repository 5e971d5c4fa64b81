// The pages that queries read, but for what a policy chooses by scores, and those among which it chooses.
#pragma once

#include "kv_attention/shared/layout.h"

namespace graphopt {

// The pages that may be chosen for a query: those with a visible token that is not always read.
struct Candidates {
  int64_t first = 0, end = 0;

  Candidates() = default;
  GRAPHOPT_INLINE Candidates(const Layout& layout, int64_t position) {
    int64_t begin = layout.sinks;
    const int64_t last = position - layout.recent;
    if (layout.first_seen(position) > begin) begin = layout.first_seen(position);
    if (begin > last) return;
    first = layout.page_of(begin), end = layout.page_of(last) + 1;
  }
};

// The pages with a token that some of these queries see.
template <typename Call, typename Queries>
GRAPHOPT_INLINE Candidates pages_seen(const Call& call, const Queries& queries) {
  const Layout& layout = call.layout;
  const int64_t first = call.position(queries.row, queries.first_column);
  Candidates seen;
  seen.end = layout.page_of(call.position(queries.row, queries.end_column - 1)) + 1;
  seen.first = layout.page_of(layout.first_seen(first));
  return seen;
}

// Floats that scores of so many candidates take, and that listing them takes: weights lie behind the scores.
GRAPHOPT_INLINE size_t score_floats(size_t count) { return (count + 15) / 16 * 16; }
GRAPHOPT_INLINE size_t list_floats(const Layout& layout, size_t count) {
  return (layout.mass > 0 ? 2 : 1) * score_floats(count);
}

// The most pages in a list that a policy makes for a query at `position`.
GRAPHOPT_INLINE size_t longest_list(Policy policy, const Layout& layout, int64_t position) {
  const int64_t all = layout.page_of(position) + 1;
  const auto least = [&](int64_t pages) { return pages < all ? pages : all; };
  const int64_t page = static_cast<int64_t>(layout.page);
  const int64_t fixed = least(layout.fixed_pages()), recent = least((layout.recent - 1) / page + 2);
  const int64_t listed = with_policy(policy, [&](auto states) { return decltype(states)::most_listed(layout); });
  return static_cast<size_t>(least(fixed + recent + least(listed)));
}

// The pages 0..`sinks`, then `begin` on, `pages` in all: what queries at positions `first` to `last` read without
// choosing.
struct PageRange {
  int64_t sinks, begin;
  size_t pages;

  GRAPHOPT_INLINE PageRange(const Layout& layout, Policy policy, int64_t first, int64_t last) {
    begin = layout.first_seen(first);
    if (may_drop(policy) && first - layout.recent + 1 > begin) begin = first - layout.recent + 1;
    begin = begin > 0 ? layout.page_of(begin) : 0;
    const int64_t fixed = layout.fixed_pages();
    sinks = reads_all(policy) ? 0 : fixed < begin ? fixed : begin;
    pages = static_cast<size_t>(sinks + layout.page_of(last) - begin + 1);
  }
  GRAPHOPT_INLINE int64_t page(size_t index) const {
    const int64_t i = static_cast<int64_t>(index);
    return i < sinks ? i : begin + (i - sinks);
  }
};

}  // namespace graphopt
