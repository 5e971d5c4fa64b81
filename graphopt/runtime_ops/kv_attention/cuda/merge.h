// The end of a query's softmax: with the token for dropped ones and the logit of the sink it becomes a row of y.
#pragma once

#include "kv_attention/cuda/call.h"

namespace graphopt {

// Numbers of a row of 256 channels at most, shared by the lanes of a warp: lane i has channels i, i + 32 and so on.
constexpr int kLaneChannels = 8;

// The token that replaces what a query dropped: its mean key and value, null where no page was dropped whole, and
// how many tokens they are of.
struct DroppedTokens {
  const float* mean = nullptr;
  int64_t count = 0;

  GRAPHOPT_DEVICE DroppedTokens(const CudaCall& call, int row, int head, int64_t position) {
    const Layout& layout = call.layout;
    if (!layout.compensate || !may_drop(call.policies[head])) return;
    const int64_t from = position - layout.recent + 1;
    if (from <= 0) return;
    const int64_t end = layout.page_of(from);
    count = end * static_cast<int64_t>(layout.page) - layout.sinks;
    if (count <= 0) return;
    mean = call.head_state(row, head).summaries + layout.physical(end - 1) * layout.summary + layout.known;
  }
};

// Writes y of one query, all lanes together; `values` are weighted by exponentials of what scores are less than
// `largest`, and `sum` is the sum of these, 0 where nothing is read.
GRAPHOPT_DEVICE void write_row(const CudaCall& call, int row, int head, int64_t position, int query_head, float largest,
                               float sum, const float (&values)[kLaneChannels]) {
  const Layout& layout = call.layout;
  const int size = static_cast<int>(layout.size);
  const size_t at = call.queries_at(row, head, position) + static_cast<size_t>(query_head) * layout.size;
  const bool any = sum != 0;
  float most = largest, score = kNothing;
  const DroppedTokens dropped(call, row, head, position);
  if (dropped.mean) {
    float product = 0;
    for (int c = lane(); c < size; c += kWarp) {
      product = multiply_add(load_number(call.query, call.type, at + c) * layout.scale, dropped.mean[c], product);
    }
    score = soften(layout, spoil(reduce_sum(product))) + logf(static_cast<float>(dropped.count));
    most = score > most ? score : most;
  }
  float logit = kNothing;
  if (call.sink_logits) {
    logit = call.sink_logits[static_cast<size_t>(head) * layout.group + static_cast<size_t>(query_head)];
    most = logit > most ? logit : most;
  }
  const float factor = largest == most ? 1.0f : exponential(largest - most);
  float total = sum * factor, of_dropped = 0;
  if (call.sink_logits) total += exponential(logit - most);
  if (dropped.mean) total += of_dropped = exponential(score - most);
  GRAPHOPT_UNROLL
  for (int k = 0; k < kLaneChannels; ++k) {
    const int c = lane() + k * kWarp;
    if (c >= size) break;
    float value = values[k] * factor;
    if (dropped.mean) value = multiply_add(dropped.mean[size + c], of_dropped, value);
    store_number(call.y, call.type, at + c, any ? value / total : 0.0f);
  }
}

}  // namespace graphopt
