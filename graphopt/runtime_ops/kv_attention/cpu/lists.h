// The lists of the policies that make some: a file of policies/ for each has score() and list().
#pragma once

#include "kv_attention/cpu/policies/retrieval.h"

namespace graphopt {
namespace {

void score_pages_of(const Attention& call, size_t row, size_t head, size_t column, int64_t first, int64_t end,
                    float* scores) {
  with_policy(call.policies[head], [&](auto states) {
    if constexpr (decltype(states)::kLists) score(states, call, row, head, column, first, end, scores);
  });
}

size_t list_pages_of(Policy policy, const Layout& layout, int64_t position, float* scores, PageEntry* entries) {
  return with_policy(policy, [&](auto states) -> size_t {
    if constexpr (decltype(states)::kLists) return list(states, layout, position, scores, entries);
    return 0;
  });
}

}  // namespace
}  // namespace graphopt
