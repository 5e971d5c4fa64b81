// The lists of sparse prefill: the queries that a block asks score all pages in full, and pages of little weight are left
// out.
#pragma once

#include "kv_attention/cpu/sampled_scores.h"
#include "kv_attention/cpu/attend.h"
#include "kv_attention/cpu/left_out.h"
#include "kv_attention/shared/select.h"

namespace graphopt {
namespace {

inline size_t score_scratch(SparsePrefill, const Attention& call, const Queries&) {
  const size_t rows = call.layout.sampled_queries() * call.layout.group;
  return attend_scratch(call.layout, rows) + Partial::floats(rows, call.layout.value_channels()) * sizeof(float);
}

inline void score(SparsePrefill, const Attention& call, const Queries& queries, int64_t first, int64_t end,
                  float* scores, void* scratch) {
  const Layout& layout = call.layout;
  const size_t count = layout.sampled_queries(), rows = count * layout.group;
  Member members[kMostSamples];
  for (size_t i = 0; i < count; ++i) {
    const size_t column = queries.first_column + (i + 1) * static_cast<size_t>(layout.query_stride) - 1;
    members[i] = {static_cast<uint32_t>(queries.row), static_cast<uint32_t>(column)};
  }
  Queries asking = queries;
  asking.members = members, asking.first_column = 0, asking.end_column = count;
  asking.list = nullptr, asking.whole = true, asking.sinks = 0, asking.begin = first;
  asking.pages = static_cast<size_t>(end - first);
  const Candidates seen = pages_seen(call, queries);
  const SampledScores samples(scores, rows, static_cast<size_t>(seen.end - seen.first), seen.first);
  samples.clear(first, end);
  float* const partial = reinterpret_cast<float*>(static_cast<char*>(scratch) + attend_scratch(layout, rows));
  Reader reader(call, asking, scratch, Partial(partial, rows, layout.value_channels()));
  reader.samples = &samples;
  read_pages(call, &reader, 1, 0, asking.pages);
}

// Weights of pages, over all sampled queries: of what each reads only if the page is not left out.
inline size_t list(SparsePrefill, const Attention& call, const Queries& queries, float* scores, PageEntry* entries) {
  const Layout& layout = call.layout;
  const Candidates seen = pages_seen(call, queries);
  const size_t count = static_cast<size_t>(seen.end - seen.first), rows = layout.sampled_queries() * layout.group;
  const SampledScores samples(scores, rows, count, seen.first);
  float* const weights = scores + samples.floats();
  for (size_t i = 0; i < count; i += kColumns) store_line(weights + i, all_lanes(0.f));
  for (size_t r = 0; r < rows; ++r) {
    const float* const logit = call.sink_logits ? call.sink_logits + queries.head * layout.group + r % layout.group : nullptr;
    samples.add_shares(r, logit, weights);
  }
  const float limit = (1 - layout.prefill_mass) * static_cast<float>(rows);
  const LeftOut pages(weights, count, limit);
  const int64_t from = call.position(queries.row, queries.first_column) - layout.recent + 1;
  const int64_t recent = from > 0 ? layout.page_of(from) : 0, fixed = layout.fixed_pages();
  size_t listed = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t page = seen.first + static_cast<int64_t>(i);
    if (!pages.drops(i)) entries[listed++] = 2 * page + 1;
    else if (page < fixed || page >= recent) entries[listed++] = 2 * page;
  }
  return listed;
}

}  // namespace
}  // namespace graphopt
