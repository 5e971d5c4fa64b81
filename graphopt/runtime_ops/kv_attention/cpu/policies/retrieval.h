// The lists of retrieval: pages are scored by their summaries, and those of the highest scores are read.
#pragma once

#include "kv_attention/cpu/choose.h"
#include "kv_attention/cpu/score.h"

namespace graphopt {
namespace {

inline size_t score_scratch(Retrieval, const Attention&, const Queries&) { return 0; }

inline void score(Retrieval, const Attention& call, const Queries& queries, int64_t first, int64_t end, float* scores,
                  void*) {
  const int64_t position = call.position(queries.row, queries.first_column);
  scores += first - Candidates(call.layout, position).first;
  score_candidates(call, queries.row, queries.head, queries.first_column, first, end, scores);
}

inline size_t list(Retrieval, const Attention& call, const Queries& queries, float* scores, PageEntry* entries) {
  return list_pages(call.layout, call.position(queries.row, queries.first_column), scores, entries);
}

}  // namespace
}  // namespace graphopt
