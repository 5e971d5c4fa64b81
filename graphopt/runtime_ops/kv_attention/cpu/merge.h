// Merges partial results of the same queries with the token for dropped ones and the logit of the sink.
#pragma once

#include "kv_attention/cpu/compensate.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"
#include "kv_attention/cpu/softmax.h"

namespace graphopt {
namespace {

void merge(const Attention& call, const Queries& queries, const Source* sources, size_t count) {
  const Layout& layout = call.layout;
  const size_t size = layout.value_channels(), rows = queries.columns() * layout.group;
  for (size_t r = 0; r < rows; ++r) {
    const size_t token = call.token(queries.row, queries.first_column + r / layout.group);
    const size_t head = queries.head * layout.group + r % layout.group;
    float* const y = call.y + (token * layout.query_heads() + head) * size;
    const auto each_part = [&](const auto& visit) {
      for (const Source* source = sources; source != sources + count; ++source) {
        for (size_t i = 0; i < source->count; ++i) visit(source->part(i, size), source->first_row + r);
      }
    };
    bool any = false;
    float largest = kNothing;
    each_part([&](const Partial& partial, size_t row) {
      any = any || partial.sums[row] != 0;
      if (partial.largest[row] > largest) largest = partial.largest[row];
    });
    if (!any) {
      __builtin_memset(y, 0, size * sizeof(float));
      continue;
    }
    const Dropped dropped(call, queries, queries.first_column + r / layout.group);
    float score = kNothing, sum = 0;
    if (dropped.mean) {
      score = dropped.score(layout, call.query + (token * layout.query_heads() + head) * size);
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
    each_part([&](const Partial& partial, size_t row) {
      if (partial.sums[row] == 0) return;
      const float weight = partial.largest[row] == largest ? 1 : exponential(partial.largest[row] - largest);
      sum += partial.sums[row] * weight;
      for (size_t c = 0; c < size; c += kColumns) {
        const Floats values = load_line<Floats>(partial.values + row * size + c);
        store_line(y + c, fused(values, all_lanes(weight), load_line<Floats>(y + c)));
      }
    });
    for (size_t c = 0; c < size; c += kColumns) store_line(y + c, spoil(load_line<Floats>(y + c) / all_lanes(sum)));
  }
}

}  // namespace
}  // namespace graphopt
