// The lists of the policies that make some: a file of policies/ for each has score() and list().
#pragma once

#include "kv_attention/cpu/policies/retrieval.h"
#include "kv_attention/cpu/policies/sparse_prefill.h"

namespace graphopt {
namespace {

template <typename States>
constexpr bool has_lists = States::kLists || States::kBlocks;

size_t score_scratch_of(const Attention& call, const Queries& queries) {
  return with_policy(call.policies[queries.head], [&](auto states) -> size_t {
    if constexpr (has_lists<decltype(states)>) return score_scratch(states, call, queries);
    return 0;
  });
}

void score_pages_of(const Attention& call, const Queries& queries, int64_t first, int64_t end, float* scores,
                    void* scratch) {
  with_policy(call.policies[queries.head], [&](auto states) {
    if constexpr (has_lists<decltype(states)>) score(states, call, queries, first, end, scores, scratch);
  });
}

size_t list_pages_of(const Attention& call, const Queries& queries, float* scores, PageEntry* entries) {
  return with_policy(call.policies[queries.head], [&](auto states) -> size_t {
    if constexpr (has_lists<decltype(states)>) return list(states, call, queries, scores, entries);
    return 0;
  });
}

}  // namespace
}  // namespace graphopt
