// How a call is cut into tasks: by rows, heads, columns and runs of pages, never by the number of threads.
#pragma once

#include <atomic>

#include "kv_attention/cpu/kernels.h"

namespace graphopt {

// Queries in one block read pages together, so that a page serves many of them while it is in a cache.
constexpr size_t kBlockRows = 64;

// A run of pages of a block of queries.
struct Run {
  size_t queries, first, end;
};

struct Plan {
  size_t queries = 0, most_rows = 0;
  size_t pages = 0;         // of all queries together, at most
  size_t most_pages = 0;    // of one block of them, at most
  size_t run_pages = 0;     // of a run; all that the queries read, where there are many
  bool split = false;       // queries are so few that their pages are shared out
  double cycles = 0;        // or so, of one thread

  explicit Plan(const Attention& call);
  // Calls visit(queries) for all of them; of those that retrieve, `pages` is the most that they may read.
  template <typename Visit>
  static void each(const Attention& call, const Visit& visit);
  size_t runs(size_t pages) const { return pages <= run_pages ? 1 : (pages + run_pages - 1) / run_pages; }
};

// Fills in which pages the queries read, but for retrieval.
void find_pages(const Attention& call, Queries* queries);

template <typename Visit>
void Plan::each(const Attention& call, const Visit& visit) {
  const Layout& layout = call.layout;
  for (size_t row = 0; row < call.rows; ++row) {
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      const bool alone = call.policies[head] == Policy::kRetrieval || layout.group > kBlockRows / 2;
      const size_t columns = alone ? 1 : kBlockRows / layout.group;
      for (size_t column = call.first_column(row); column < call.columns; column += columns) {
        Queries queries = {};
        queries.row = row, queries.head = head, queries.first_column = column;
        queries.end_column = call.columns - column < columns ? call.columns : column + columns;
        find_pages(call, &queries);
        visit(queries);
      }
    }
  }
}

}  // namespace graphopt
