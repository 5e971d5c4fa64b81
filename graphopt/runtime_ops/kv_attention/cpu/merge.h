// Merges partial results of the same queries with the token for dropped ones and the logit of the sink.
#pragma once

#include "kv_attention/cpu/compensate.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

void merge(const Attention& call, const Queries& queries, const float* partials, size_t count) {
  const Layout& layout = call.layout;
  const size_t size = layout.size, rows = (queries.end_column - queries.first_column) * layout.group;
  const size_t stride = Partial::floats(rows, size);
  for (size_t r = 0; r < rows; ++r) {
    const size_t column = queries.row * call.columns + queries.first_column + r / layout.group;
    const size_t head = queries.head * layout.group + r % layout.group;
    float* const y = call.y + (column * layout.query_heads() + head) * size;
    const auto part = [&](size_t i) { return Partial(const_cast<float*>(partials) + i * stride, rows, size); };
    bool any = false;
    float largest = kNothing;
    for (size_t i = 0; i < count; ++i) {
      any = any || part(i).sums[r] != 0;
      if (part(i).largest[r] > largest) largest = part(i).largest[r];
    }
    if (!any) {
      __builtin_memset(y, 0, size * sizeof(float));
      continue;
    }
    const Dropped dropped(call, queries, queries.first_column + r / layout.group);
    float score = kNothing, sum = 0;
    if (dropped.mean) {
      score = dropped.score(layout, call.query + (column * layout.query_heads() + head) * size);
      if (score > largest) largest = score;
    }
    if (call.sink_logits) {
      const float logit = call.sink_logits[head];
      if (logit > largest) largest = logit;
      sum = exponential(logit - largest);
    }
    for (size_t c = 0; c < size; c += kColumns) store_line(y + c, all_lanes(0.f));
    if (dropped.mean) {
      const float weight = exponential(score - largest);
      sum += weight;
      for (size_t c = 0; c < size; c += kColumns) {
        store_line(y + c, load_line<Floats>(dropped.mean + size + c) * all_lanes(weight));
      }
    }
    for (size_t i = 0; i < count; ++i) {
      const Partial partial = part(i);
      if (partial.sums[r] == 0) continue;
      const float weight = partial.largest[r] == largest ? 1 : exponential(partial.largest[r] - largest);
      sum += partial.sums[r] * weight;
      for (size_t c = 0; c < size; c += kColumns) {
        const Floats values = load_line<Floats>(partial.values + r * size + c);
        store_line(y + c, fused(values, all_lanes(weight), load_line<Floats>(y + c)));
      }
    }
    for (size_t c = 0; c < size; c += kColumns) store_line(y + c, load_line<Floats>(y + c) / all_lanes(sum));
  }
}

}  // namespace
}  // namespace graphopt
