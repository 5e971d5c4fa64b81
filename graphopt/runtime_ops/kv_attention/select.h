// The pages among which retrieval chooses.
#pragma once

#include "kv_attention/cpu.h"

namespace graphopt {

// The pages that may be chosen for a query: those that hold a visible token which is not read in any case.
struct Candidates {
  int64_t first = 0, end = 0;

  Candidates(const Layout& layout, int64_t position);
};

// Floats that scores of so many candidates take, and that listing them takes: weights lie behind the scores.
GRAPHOPT_INLINE size_t score_floats(size_t count) { return (count + 15) / 16 * 16; }
GRAPHOPT_INLINE size_t list_floats(const Layout& layout, size_t count) {
  return (layout.mass > 0 ? 2 : 1) * score_floats(count);
}

// The most pages in a list for a query at `position`.
size_t longest_list(const Layout& layout, int64_t position);

}  // namespace graphopt
