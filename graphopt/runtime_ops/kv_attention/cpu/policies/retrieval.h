// The lists of retrieval: pages are scored by their summaries, and those of the highest scores are read.
#pragma once

#include "kv_attention/cpu/choose.h"
#include "kv_attention/cpu/score.h"

namespace graphopt {
namespace {

inline void score(Retrieval, const Attention& call, size_t row, size_t head, size_t column, int64_t first, int64_t end,
                  float* scores) {
  score_candidates(call, row, head, column, first, end, scores);
}

inline size_t list(Retrieval, const Layout& layout, int64_t position, float* scores, PageEntry* entries) {
  return list_pages(layout, position, scores, entries);
}

}  // namespace
}  // namespace graphopt
